"""`tessera chat` with a scripted server; in a terminal of its own where a person types."""

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time

import pytest

from tests.cli import fake_server as fake
from tests.waiting import GIVE_UP

MODELS = fake.plain({"data": [{"id": "small"}]})


def answer(*texts):
    deltas = [fake.chat_delta(text) for text in texts]
    return fake.chunked(*deltas, fake.chat_delta(None, "stop"), fake.DONE)


def messages(server):
    return json.loads(server.requests[-1][2])["messages"]


@pytest.fixture
def server(start):
    return start({"/v1/models": MODELS, "/v1/chat/completions": answer("Good ", "day")})


def test_standard_input_that_is_no_terminal_is_one_message(tessera, server, typed):
    typed("Hello\nthere\n")

    assert tessera("chat", server.url) == (0, "Good day", "")
    assert messages(server) == [{"role": "user", "content": "Hello\nthere"}]


def test_instructions_are_the_first_message_and_flags_are_fields(tessera, server, typed):
    typed("Hello")
    tessera("chat", server.url, "--system=Be brief.", "--max-tokens=5", "--temperature=0.5")

    body = json.loads(server.requests[-1][2])
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("small", 5, 0.5)


def test_a_server_without_chat_is_refused_with_an_alternative(tessera, start, typed):
    typed("Hello")
    server = start({"/v1/models": fake.plain({}, "404 Not Found")})

    status, _, err = tessera("chat", server.url)

    assert status == 1
    assert "no /v1/chat/completions; `tessera complete`" in err


def test_a_model_without_a_chat_template_is_refused_in_the_servers_words(tessera, start, typed):
    typed("Hello")
    refusal = fake.plain({"error": {"message": "small has no chat template"}}, "400 Bad Request")
    server = start({"/v1/models": MODELS, "/v1/chat/completions": refusal})

    assert "small has no chat template" in tessera("chat", server.url)[2]


# A terminal sends interrupts only to the processes whose controlling terminal it is.
WITH_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background pass on that it is ignored
from server.cli.main import main
main(sys.argv[1:])
"""


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *arguments):
        self._ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITH_TERMINAL, *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )  # fmt: skip
        os.close(theirs)
        self.output = ""

    def type_in(self, text):
        os.write(self._ours, text.encode())

    def expect(self, pattern, seconds=20.0):
        """Wait until the output after the last match matches a pattern; return the match."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.output)):
            if not select.select([self._ours], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"no {pattern!r} in {self.output!r}")
            self.output += os.read(self._ours, 65536).decode()
        self.output = self.output[match.end() :]
        return match

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal():
    pytest.importorskip("termios")
    with contextlib.ExitStack() as stack:

        def begin(*arguments):
            started = Terminal(*arguments)
            stack.callback(started.close)
            return started

        yield begin


def test_a_conversation_keeps_its_messages_until_a_new_one_begins(terminal, server):
    chat = terminal("chat", server.url)
    chat.expect("small at http://.*Ctrl-C stops an answer")
    chat.expect("> ")
    chat.type_in("one\r")
    chat.expect("Good day[\r\n]+> ")
    chat.type_in("two\r")
    chat.expect("Good day[\r\n]+> ")
    assert [m["content"] for m in messages(server)] == ["one", "Good day", "two"]

    chat.type_in("/new\r")
    chat.expect("> ")
    chat.type_in("three\r")
    chat.expect("Good day[\r\n]+> ")
    assert [m["content"] for m in messages(server)] == ["three"]

    chat.type_in("/exit\r")
    assert chat.process.wait(GIVE_UP) == 0
    assert server.connections == 1


def test_an_interrupt_stops_the_answer_and_not_the_conversation(terminal, start):
    scripts = [[*fake.chunked(fake.chat_delta("begun"))[:2], 60.0], answer("later")]
    server = start({"/v1/models": MODELS, "/v1/chat/completions": lambda _: scripts.pop(0)})
    chat = terminal("chat", server.url)
    chat.expect("> ")
    chat.type_in("one\r")
    chat.expect("begun")
    chat.type_in("\x03")
    chat.expect(r"\[stopped\]")
    chat.expect("> ")
    chat.type_in("two\r")
    chat.expect("later[\r\n]+> ")

    assert [m["content"] for m in messages(server)] == ["one", "begun", "two"]
    assert server.connections == 2, "the first was closed, which aborts its request"


def test_an_interrupt_at_the_prompt_drops_the_line_and_the_end_of_input_ends(terminal, server):
    chat = terminal("chat", server.url)
    chat.expect("> ")
    chat.type_in("half a li")
    chat.expect("half a li")
    for last_try in (False, False, True):
        chat.type_in("\x03")  # readline misses a signal that comes while it handles a character
        with contextlib.nullcontext() if last_try else contextlib.suppress(AssertionError):
            chat.expect("> ", 5.0)
            break
    chat.type_in("\x04")

    assert chat.process.wait(GIVE_UP) == 0
    assert [path for path, *_ in server.requests] == ["/v1/models"]


def test_a_refused_message_is_no_part_of_the_conversation(terminal, start):
    refusal = fake.plain({"error": {"message": "too long"}}, "400 Bad Request")
    scripts = [refusal, answer("fine")]
    server = start({"/v1/models": MODELS, "/v1/chat/completions": lambda _: scripts.pop(0)})
    chat = terminal("chat", server.url)
    chat.expect("> ")
    chat.type_in("long\r")
    chat.expect("too long")
    chat.expect("> ")
    chat.type_in("short\r")
    chat.expect("fine")

    assert [m["content"] for m in messages(server)] == ["short"]


def test_a_text_cannot_control_the_terminal(terminal, start):
    server = start({"/v1/models": MODELS, "/v1/chat/completions": answer("a\x1b[2Jb\x07c\td")})
    chat = terminal("chat", server.url)
    chat.expect("> ")
    chat.type_in("one\r")
    chat.expect("a\ufffd\\[2Jb\ufffdc\\s+d")
