"""Tokenizers that may take any time run in processes with limits."""

import os
import signal
import sys
import threading
import time

import pytest

from model.errors import TokenizerError
from model.text.bounded import processes
from model.text.bounded.processes import try_folder
from model.text.special_text import SpecialText
from model.text.tokenizer import Tokenizer
from tests.model.text.bounded.test_limits import added, replace, write

HOSTILE = {
    "type": "Split", "pattern": {"Regex": "a+c|."}, "behavior": "Isolated", "invert": False,
}  # fmt: skip
"""Takes a minute for 200,000 times "a", and never reaches the library's limit for one place."""


def workers(tokenizer):
    return tokenizer._processes._pool.pids


def limit(monkeypatch, **limits):
    """Run the program with other limits."""
    for name, value in limits.items():
        monkeypatch.setattr(processes, name, value)
    change = "; ".join(f"processes.{name} = {value}" for name, value in limits.items())
    program = f"from model.text.bounded import processes; {change}; from model.text.bounded.program import main; main()"
    monkeypatch.setattr(processes, "_COMMAND", (sys.executable, "-P", "-c", program))


@pytest.fixture
def hostile(tmp_path):
    tokenizer = Tokenizer.from_folder(
        write(tmp_path, pre_tokenizer=HOSTILE, added_tokens=[*added(1), added(1, first=5)[0] | {
            "content": "<s>", "special": True,
        }])
    )  # fmt: skip
    yield tokenizer
    tokenizer.close()


def test_results_equal_those_of_the_same_process(hostile, tmp_path):
    here = Tokenizer.from_folder(tmp_path, in_process=True)
    assert not hostile.is_linear
    text = "b<0>xxxxxé a<s>"

    assert hostile.encode(text) == here.encode(text)
    theirs, ours = (it.encode_with_offsets(text) for it in (hostile, here))
    assert list(theirs) == list(ours)
    for special in (SpecialText(it, ["<s>"]) for it in (hostile, here)):
        assert special.encode(special.mark("b<s>")) == [1, 5]
    with pytest.raises(TokenizerError, match="lone surrogate"):
        hostile.encode("\ud800")


def test_a_text_that_takes_too_long_is_an_error_and_the_next_one_is_tokenized(hostile, monkeypatch):
    limit(monkeypatch, TEXT_SECONDS=0.1, SECONDS_PER_BYTE=0)
    with pytest.raises(TokenizerError, match="needs too much time for a text of 200000 bytes"):
        hostile.encode("a" * 200_000)

    assert hostile.encode("b") == [1]


def test_a_process_that_something_else_ends_is_no_error_of_the_text(hostile):
    hostile.encode("b")
    (pid,) = workers(hostile)
    os.kill(pid, signal.SIGKILL)

    assert hostile.encode("b") == [1]
    assert workers(hostile) != [pid]


def test_a_process_that_is_stopped_is_replaced(hostile):
    hostile.encode("b")
    (pid,) = workers(hostile)
    os.kill(pid, signal.SIGSTOP)

    assert hostile.encode("b") == [1]
    assert workers(hostile) != [pid]


def test_closing_ends_what_is_being_tokenized(hostile):
    errors = []

    def encode():
        try:
            hostile.encode("a" * 200_000)
        except TokenizerError as error:
            errors.append(str(error))

    thread = threading.Thread(target=encode)
    thread.start()
    while not hostile._processes._pool.num_busy:
        time.sleep(0.01)
    hostile.close()
    thread.join(60)

    assert errors == ["the process of the tokenizer was ended"]
    with pytest.raises(TokenizerError, match="was ended"):
        hostile.encode("a")


def test_a_text_that_takes_too_much_memory_is_an_error(tmp_path, monkeypatch):
    limit(monkeypatch, MEMORY_BYTES=200 << 20)
    steps = {"type": "Sequence", "normalizers": [replace("aa")] * 9}
    tokenizer = Tokenizer.from_folder(write(tmp_path, normalizer=steps))
    try:
        with pytest.raises(TokenizerError, match=r"too much (memory|time)"):
            tokenizer.encode(
                "a" * 500_000
            )  # 256 MB, of which the library notes where each came from
    finally:
        tokenizer.close()


def test_a_child_gets_no_secrets(hostile, monkeypatch):
    monkeypatch.setenv("TESSERA_API_KEY", "key")
    monkeypatch.setenv("HF_TOKEN", "token")
    hostile.encode("b")
    (pid,) = workers(hostile)

    with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - of the kernel
        assert not {b"TESSERA_API_KEY", b"HF_TOKEN"} & {
            it.split(b"=")[0] for it in file.read().split(b"\0")
        }


def test_a_folder_is_tried(tmp_path):
    try_folder(write(tmp_path))


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    with pytest.raises(TokenizerError, match="added tokens: 100001; at most 100000"):
        try_folder(write(tmp_path, added_tokens=added(100_001)))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"READ_SECONDS": 0.05}, "needs too much time"),
        ({"MEMORY_BYTES": 150 << 20}, "cannot|needs too much memory"),
    ],
)
def test_a_folder_that_takes_too_much_is_an_error_of_its_file(
    tmp_path, monkeypatch, limits, message
):
    limit(monkeypatch, **limits)
    write(tmp_path, added_tokens=added(100_000, 30))

    with pytest.raises(TokenizerError, match=message) as caught:
        try_folder(tmp_path)

    assert str(tmp_path / "tokenizer.json") in str(caught.value)
