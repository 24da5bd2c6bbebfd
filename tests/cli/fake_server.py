"""A server that sends scripted responses."""

import asyncio
import contextlib
import json
import threading

from tests.waiting import GIVE_UP


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(*parts):
    """Return the script of a streamed response: bytes are chunks, numbers are seconds to wait."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = [chunk(part) if isinstance(part, bytes) else part for part in parts]
    return [head, *body, b"0\r\n\r\n"]


def plain(body, status="200 OK"):
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    return [b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)]


def tgi_token(text="x", index=1):
    return (
        b"data:" + json.dumps({"index": index, "token": {"id": 7, "text": text}}).encode() + b"\n\n"
    )


def tgi_last(tokens, prompt=3):
    details = {"generated_tokens": tokens, "input_length": prompt}
    event = {"token": {"id": 7}, "generated_text": "all", "details": details}
    return b"data:" + json.dumps(event).encode() + b"\n\n"


def openai_token(text="x", finish_reason=None):
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def openai_usage(tokens, prompt=3):
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
HANG_UP = "hang up"


class FakeServer:
    """Responds to each path with a script, or with the script that a function returns for the body.

    Attributes:
        requests: (path, headers, body) of each, in order.
        connections: number of connections so far.
        in_flight, most_in_flight: current and largest number of concurrent requests.
    """

    def __init__(self, scripts):
        self.scripts = scripts
        self.requests = []
        self.connections = self.in_flight = self.most_in_flight = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = lines[0].split()[1]
                self.requests.append((path, headers, body))
                script = self.scripts[path]
                self.in_flight += 1
                self.most_in_flight = max(self.in_flight, self.most_in_flight)
                for part in script(body) if callable(script) else script:
                    if part == HANG_UP:
                        return
                    if isinstance(part, bytes):
                        writer.write(part)
                        await writer.drain()
                    else:
                        await asyncio.sleep(part)
                self.in_flight -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


class ThreadedServer(FakeServer):
    """A `FakeServer` in a thread of its own, for clients that are not coroutines."""

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._wait(self.__aenter__())
        return self

    def __exit__(self, *_):
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self):
        self._server.close()
        handlers = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)

    def _wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(GIVE_UP)


@contextlib.contextmanager
def starter():
    """Yield a function that starts a server with scripts for its paths; they end with the block."""
    with contextlib.ExitStack() as servers:
        yield lambda scripts: servers.enter_context(ThreadedServer(scripts))


def event(value):
    """Render a server-sent event with JSON as its data."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chat_delta(text, finish_reason=None):
    return event({"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]})
