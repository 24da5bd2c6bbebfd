"""POST /generate_stream: the exact bytes, errors during a stream, coalescing of tokens, and keep-alive comments."""

import asyncio
import json

import msgspec
import pytest

from server.engine.core.request import FinishReason
from server.http.dialects.tgi.replies import StreamEvent
from tests.http.conftest import frames
from tests.http.fakes import EOS_ID, FakeEngine, event, put, say
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio


async def stream(client, path="/generate_stream", inputs="hello", **parameters):
    return await client.post(path, json={"inputs": inputs, "parameters": parameters})


async def test_golden_transcript_without_details(client, engine, tokenizer):
    h, i = tokenizer.encode("Hi")
    engine.script = say([h, i, EOS_ID], FinishReason.EOS, logprob=-0.61962890625)

    response = await stream(client)

    assert response.status_code == 200
    assert response.content == (
        b'data:{"index":1,"token":{"id":%d,"text":"H","logprob":-0.619628906,"special":false},'
        b'"generated_text":null,"details":null}\n\n'
        b'data:{"index":2,"token":{"id":%d,"text":"i","logprob":-0.619628906,"special":false},'
        b'"generated_text":null,"details":null}\n\n'
        b'data:{"index":3,"token":{"id":256,"text":"</s>","logprob":-0.619628906,"special":true},'
        b'"generated_text":"Hi","details":null}\n\n' % (h, i)
    )


async def test_golden_transcript_with_details_and_top_tokens(client, engine, tokenizer):
    quote, newline = tokenizer.encode('"\n')
    engine.script = say([quote, newline], FinishReason.LENGTH, top=((EOS_ID, -2.0),))

    response = await stream(client, details=True, top_n_tokens=1, seed=3, do_sample=True)

    top = b'"top_tokens":[{"id":256,"text":"</s>","logprob":-2.0,"special":true}],'
    assert response.content == (
        b'data:{"index":1,"token":{"id":%d,"text":"\\"","logprob":-0.5,"special":false},%b'
        b'"generated_text":null,"details":null}\n\n'
        b'data:{"index":2,"token":{"id":%d,"text":"\\n","logprob":-0.5,"special":false},%b'
        b'"generated_text":"\\"\\n","details":{"finish_reason":"length","generated_tokens":2,'
        b'"seed":3,"input_length":5,"usage":{"queue_ms":2.0,"prefill_ms":250.0,"decode_ms":500.0,'
        b'"computed_prompt_tokens":4,"cached_prompt_tokens":2,"recomputed_tokens":1,"steps":3,'
        b'"draft_tokens":5,"accepted_tokens":4,'
        b'"device_seconds":0.125,"kv_block_seconds":1.5}}}\n\n' % (quote, top, newline, top)
    )


async def test_headers_of_a_stream(client):
    headers = (await stream(client)).headers

    assert headers["content-type"] == "text/event-stream"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-compute-type"] == "cpu"
    assert headers["x-compute-characters"] == "5"
    assert headers["x-prompt-tokens"] == "5"


async def test_every_event_matches_the_documented_schema(client, engine, tokenizer):
    engine.script = say(tokenizer.encode("é€"), FinishReason.LENGTH, top=((1, -1.0),))

    for frame in frames(await stream(client, details=True, top_n_tokens=1)):
        event = msgspec.convert(frame, StreamEvent)
        assert msgspec.json.decode(msgspec.json.encode(event)) == frame


async def test_compat_route_streams_on_request(client, engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi"), FinishReason.LENGTH)

    response = await client.post("/", json={"inputs": "say: ", "stream": True})

    assert [f["generated_text"] for f in frames(response)] == [None, "say: Hi"]


async def test_texts_of_a_stream_join_to_the_generated_text(client, engine, tokenizer):
    text = 'né€🙂!\u2028\x00\x7f"\\'
    engine.script = say([*tokenizer.encode(text), EOS_ID], FinishReason.EOS)

    events = frames(await stream(client))

    assert events[-1]["generated_text"] == text
    assert "".join(e["token"]["text"] for e in events if not e["token"]["special"]) == text


async def test_a_stop_string_ends_the_stream(client, engine, tokenizer):
    engine.script = say(tokenizer.encode("one two three"), FinishReason.LENGTH, together=True)

    events = frames(await stream(client, stop=["two"], details=True))

    assert len(events) == 7
    assert events[-1]["generated_text"] == "one two"
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert engine.running == set()


async def test_an_engine_error_during_a_stream_is_the_last_event(client, engine, tokenizer):
    async def script(_engine, _request, stream):
        put(stream, event(1), event(None, FinishReason.ERROR, error="engine restarted"))

    engine.script = script

    response = await stream(client)

    assert response.status_code == 200
    assert response.content.endswith(
        b'data:{"error":"Request failed during generation: engine restarted",'
        b'"error_type":"generation"}\n\n'
    )
    assert frames(response)[0]["index"] == 1


async def test_an_incomplete_stream_ends_with_an_error_event(client, engine):
    async def script(_engine, _request, stream):
        put(stream, event(1))
        await asyncio.sleep(0)
        put(stream, event(None))

    engine.script = script

    events = frames(await stream(client))

    assert events[-1] == {
        "error": "Incomplete generation stream",
        "error_type": "incomplete_generation_stream",
    }


async def test_an_exception_during_a_stream_is_an_error_event(
    client, engine, tokenizer, monkeypatch, caplog
):
    engine.script = say([1, 2, 3], FinishReason.LENGTH)
    monkeypatch.setattr(type(tokenizer), "is_special", lambda _self, token_id: 1 / (token_id - 2))

    events = frames(await stream(client))

    assert events[-1] == {"error": "Internal server error", "error_type": "internal"}
    assert "a stream failed" in caplog.text


async def test_errors_before_the_first_byte_have_their_status(client):
    response = await stream(client, top_p=2)

    assert response.status_code == 422
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error_type"] == "validation"


class Sends:
    """An ASGI connection that records the messages that it is sent, one entry for each call."""

    def __init__(self, app, body):
        self.bodies = []
        self.starts = []
        self._app = app
        self._request = json.dumps(body).encode()
        self._read = False
        self.gone = asyncio.Event()

    async def receive(self):
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._request, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.starts.append(message)
        elif message.get("body"):
            self.bodies.append(message["body"])

    async def run(self, path="/generate_stream"):
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http",
            "server": ("test", 80), "client": ("test", 1), "root_path": "",
        }  # fmt: skip
        await self._app(scope, self.receive, self.send)


async def test_tokens_that_arrive_together_are_sent_together(make_app, engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi there"), FinishReason.LENGTH, together=True)
    connection = Sends(make_app(), {"inputs": "x"})

    await connection.run()

    assert len(connection.bodies) == 1
    assert connection.bodies[0].count(b"data:") == 8


async def test_a_single_token_is_sent_immediately(make_app, engine, tokenizer):
    seen = []

    async def script(engine, request, stream):
        for token in tokenizer.encode("Hi!"):
            put(stream, event(token))
            await asyncio.sleep(0.01)
            seen.append(len(connection.bodies))
        put(stream, event(EOS_ID, FinishReason.EOS))

    engine.script = script
    connection = Sends(make_app(), {"inputs": "x"})

    await connection.run()

    assert seen == [1, 2, 3]


async def test_a_stream_without_events_gets_comments(make_app, engine, tokenizer):
    async def script(_engine, _request, stream):
        await asyncio.sleep(0.35)
        put(stream, event(1, FinishReason.LENGTH))

    engine.script = script
    connection = Sends(make_app(keep_alive_seconds=0.1), {"inputs": "x"})

    await connection.run()

    assert connection.bodies[:-1] == [b":\n\n"] * 3
    assert connection.bodies[-1].startswith(b"data:")


async def test_a_stream_with_events_gets_no_comments(make_app, engine, tokenizer):
    engine.script = say(tokenizer.encode("x" * 20), FinishReason.LENGTH, wait=0.01)
    connection = Sends(make_app(keep_alive_seconds=0.1), {"inputs": "x"})

    await connection.run()

    assert b":\n\n" not in connection.bodies


async def test_a_stopping_server_ends_its_streams_with_an_error_event(make_app, engine):
    async def script(_engine, _request, stream):
        put(stream, event(1))
        await asyncio.Event().wait()

    engine.script = script
    app = make_app()
    connection = Sends(app, {"inputs": "x"})
    task = asyncio.create_task(connection.run())
    await asyncio.sleep(0.05)

    app.state.lifecycle.end()
    await task

    assert b'"error_type":"incomplete_generation_stream"' in connection.bodies[-1]
    assert engine.aborted == [1]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_disconnect_aborts_the_request(make_app, engine, path):
    async def script(_engine: FakeEngine, _request, stream):
        put(stream, event(1))
        await asyncio.Event().wait()

    engine.script = script
    connection = Sends(make_app(), {"inputs": "x"})
    task = asyncio.create_task(connection.run(path))
    await asyncio.sleep(0.02)

    connection.gone.set()
    async with asyncio.timeout(GIVE_UP):
        await task

    assert engine.aborted == [1]
    assert engine.running == set()
