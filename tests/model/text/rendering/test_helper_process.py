"""A helper process answers tasks, and whatever becomes of it, the one who asks is told."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from model.text.rendering.helper_process import (
    HelperEndedError,
    HelperProcess,
    HelperTimeoutError,
)

# Runs each task as Python code; what it leaves in `reply` is the reply.
CODE = """
import os, struct, sys
while header := sys.stdin.buffer.read(4):
    names = {"reply": b""}
    exec(sys.stdin.buffer.read(*struct.unpack("!I", header)), globals(), names)
    sys.stdout.buffer.write(struct.pack("!I", len(names["reply"])) + names["reply"])
    sys.stdout.buffer.flush()
"""
ENOUGH = 60.0


@pytest.fixture
def start():
    started = []

    def one(most_reply_bytes=1 << 20) -> HelperProcess:
        started.append(HelperProcess([sys.executable, "-c", CODE], {"A": "1"}, most_reply_bytes))
        return started[-1]

    yield one
    for helper in started:
        helper.kill()


def test_it_answers_tasks_of_any_size(start) -> None:
    helper = start()
    task = b"reply = b'" + b"x" * 1_000_000 + b"'"

    assert helper.ask(b"reply = b'a'", ENOUGH) == b"a"
    assert helper.ask(b"", ENOUGH) == b""
    assert helper.ask(task, ENOUGH) == b"x" * 1_000_000


def test_it_has_only_the_variables_and_files_that_it_is_given(start, monkeypatch) -> None:
    monkeypatch.setenv("TESSERA_API_KEY", "secret")
    helper = start()

    assert b"secret" not in helper.ask(b"reply = repr(dict(os.environ)).encode()", ENOUGH)
    # The fourth is the folder that is listed.
    assert helper.ask(b"reply = str(len(os.listdir('/proc/self/fd'))).encode()", ENOUGH) == b"4"


@pytest.mark.parametrize(
    ("task", "code", "words"),
    [
        (b"os._exit(3)", 3, ""),
        (b"os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        (b"raise ValueError('why')", 1, "ValueError: why"),
    ],
)
def test_its_end_is_an_error_that_says_how_it_ended(start, task, code, words) -> None:
    helper = start()
    with pytest.raises(HelperEndedError) as caught:
        helper.ask(task, ENOUGH)

    assert (caught.value.code, caught.value.last_words) == (code, words)
    assert not helper.is_usable


def test_one_that_ended_meanwhile_is_an_error_too(start) -> None:
    helper = start()
    helper.ask(b"", ENOUGH)
    os.kill(helper.pid, signal.SIGKILL)

    with pytest.raises(HelperEndedError, match="SIGKILL"):
        helper.ask(b"", ENOUGH)


def test_one_that_does_not_answer_in_time_is_killed(start) -> None:
    helper = start()
    helper.ask(b"", ENOUGH)
    os.kill(helper.pid, signal.SIGSTOP)
    with pytest.raises(HelperTimeoutError):
        helper.ask(b"x = 1 #" + b" " * 10_000_000, 0.2)  # more than the socket holds

    assert not helper.is_usable


def test_a_reply_beyond_the_limit_is_not_read(start) -> None:
    helper = start(most_reply_bytes=10)
    with pytest.raises(HelperEndedError):
        helper.ask(b"reply = b'x' * 11", ENOUGH)

    assert not helper.is_usable


def test_killing_it_wakes_the_thread_that_asks(start) -> None:
    helper, ended = start(), []
    helper.ask(b"", ENOUGH)

    def ask() -> None:
        try:
            helper.ask(b"import time; time.sleep(1000)", 1000)
        except HelperEndedError as error:
            ended.append(error.code)

    thread = threading.Thread(target=ask)
    thread.start()
    helper.kill()
    thread.join(ENOUGH)

    assert ended == [-signal.SIGKILL]
