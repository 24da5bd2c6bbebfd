"""Tokenizes in other processes, which are ended when they take too long or too much memory.

Two kinds of tokenizers need it: one that nobody has read before, whose file may keep the library busy for ever, and one
whose time for a text is not bounded (`model.text.bounded.limits`). The library cannot be interrupted, and while it
reads a file it holds the interpreter lock, so that no signal is handled either.

The program `python -m model.text.bounded.program` reads frames from its standard input, each with its size before it:
first what tokenizer to use, then texts. It answers each with one frame.
"""

from __future__ import annotations

import os
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final, Literal

import msgspec
import tokenizers

from model.errors import TokenizerError

READ_SECONDS: Final = 60
"""Processor time in which a tokenizer must be read. The largest in use take 3 s."""
TEXT_SECONDS: Final = 2.0
SECONDS_PER_BYTE: Final = 5e-6
"""Processor time for a text: five times what usual tokenizers take, and two seconds."""
MEMORY_BYTES: Final = 4 << 30

# For a process that is stopped, or gets no processor: so many times the processor time, and seconds.
_WALL_FACTOR: Final = 10
_WALL_SECONDS: Final = 60.0
SIZE: Final = struct.Struct("<Q")
_MOST_IDLE: Final = 2
_PROGRAM: Final[tuple[str, ...]] = ("-m", "model.text.bounded.program")


class Source(msgspec.Struct, frozen=True, tag=True):
    """What tokenizer to use: that of a folder, which is checked, or one that was read from its JSON."""

    folder: str = ""
    content: str = ""


class Texts(msgspec.Struct, frozen=True):
    """Texts to tokenize."""

    texts: list[str]
    add_special_tokens: bool
    offsets: bool


class Answer(msgspec.Struct, frozen=True):
    """The tokens of each text: ids, starts and ends as `array("I")`; or what went wrong, for the user."""

    encodings: list[tuple[bytes, bytes, bytes]] = []
    error: str = ""


class PlainEncoding:
    """The tokens of a text, with those methods of the library's `Encoding` that are used here.

    Attributes:
        ids: token ids.
    """

    def __init__(self, ids: bytes, starts: bytes, stops: bytes) -> None:
        self.ids = array("I", ids).tolist()
        self._starts, self._stops = array("I", starts), array("I", stops)

    def __len__(self) -> int:
        return len(self.ids)

    def token_to_chars(self, index: int) -> tuple[int, int]:
        """Return where the characters of a token begin and end."""
        return self._starts[index], self._stops[index]


class _Ended(Exception):  # noqa: N818 - no error: the caller decides
    """The process has ended.

    Args:
        by: the signal that ended it; None if it ended by itself.
    """

    def __init__(self, by: int | None) -> None:
        self.by = by


class _Worker:
    """One process. Used by one thread at a time."""

    wall_seconds = _WALL_SECONDS

    def __init__(self, source: Source) -> None:
        command = [sys.executable, "-P", *_PROGRAM]
        # In a session of its own, since an interrupt often goes to the whole process group.
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, env=_environment(), bufsize=0,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        try:
            answer = self.ask(source, READ_SECONDS)
            if answer.error:
                raise TokenizerError(answer.error)
        except BaseException:
            self.close()
            raise

    def ask(self, task: Source | Texts, seconds: float) -> Answer:
        """Send a task and wait for the answer.

        Args:
            task: the task.
            seconds: processor time that the process may take.

        Raises:
            _Ended: the process has ended.
        """
        body = msgspec.msgpack.encode(task)
        deadline = time.monotonic() + self.wall_seconds + _WALL_FACTOR * seconds
        try:
            self._write(SIZE.pack(len(body)) + body, deadline)
            (size,) = SIZE.unpack(self._read(SIZE.size, deadline))
            return msgspec.msgpack.decode(self._read(size, deadline), type=Answer)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            self.close()
            code = self._process.wait()
            raise _Ended(-code if code < 0 else None) from error

    def _write(self, data: bytes, deadline: float) -> None:
        stdin, view = self._process.stdin, memoryview(data)
        assert stdin is not None
        while view:
            _wait(stdin, selectors.EVENT_WRITE, deadline)
            view = view[os.write(stdin.fileno(), view[: 1 << 16]) :]

    def _read(self, size: int, deadline: float) -> bytes:
        stdout, data = self._process.stdout, bytearray()
        assert stdout is not None
        while len(data) < size:
            _wait(stdout, selectors.EVENT_READ, deadline)
            part = os.read(stdout.fileno(), min(1 << 20, size - len(data)))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def kill(self) -> None:
        """End the process, while another thread may wait for its answer."""
        self._process.kill()

    def close(self) -> None:
        """End the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class EncoderProcesses:
    """Takes the place of a `tokenizers.Tokenizer` for tokenizing. Thread-safe.

    A thread that tokenizes uses one process, which is kept for the next text. A text that takes too long or too much
    memory ends its process and is an error. If a process is ended by anything else, the text is tokenized by another.

    Args:
        library: the tokenizer.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._source = Source(content=library.to_str())
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._is_closed = False
        self._related: list[EncoderProcesses] = []

    def like(self, library: tokenizers.Tokenizer) -> EncoderProcesses:
        """Return processes for another tokenizer with the same steps; they are closed with these."""
        processes = EncoderProcesses(library)
        self._related.append(processes)
        return processes

    def close(self) -> None:
        """End all processes. Texts that are being tokenized, and those that follow, are errors."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.kill()  # its thread closes it
        for worker in idle:
            worker.close()
        for processes in self._related:
            processes.close()

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[PlainEncoding]:
        """Return the tokens of each text and their characters.

        Raises:
            TokenizerError: the tokenizer cannot tokenize a text, or not within the limits.
        """
        return self._encode(Texts(_checked(texts), add_special_tokens, offsets=True))

    def encode_batch_fast(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[PlainEncoding]:
        """Return the tokens of each text, without their characters; otherwise like `encode_batch`."""
        return self._encode(Texts(_checked(texts), add_special_tokens, offsets=False))

    def _encode(self, task: Texts) -> list[PlainEncoding]:
        size = sum(len(text.encode()) for text in task.texts)
        seconds = TEXT_SECONDS + SECONDS_PER_BYTE * size
        for attempt in ("first", "last"):
            try:
                worker = self._take()
                try:
                    answer = worker.ask(task, seconds)
                except BaseException:
                    with self._lock:
                        self._busy.discard(worker)
                    worker.close()
                    raise
            except _Ended as ended:
                _report(ended, "the tokenizer needs too much {} for a text of {} bytes", size)
                if attempt == "last" or self._is_closed:
                    raise TokenizerError("the process of the tokenizer was ended") from None
            else:
                self._return(worker)
                if answer.error:
                    raise TokenizerError(answer.error)
                return [PlainEncoding(*it) for it in answer.encodings]
        raise AssertionError

    def _take(self) -> _Worker:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
            if worker is not None:
                self._busy.add(worker)
                return worker
        worker = _Worker(self._source)
        with self._lock:
            self._busy.add(worker)
            if self._is_closed:
                worker.kill()
        return worker

    def _return(self, worker: _Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
            if keep := len(self._idle) < _MOST_IDLE and not self._is_closed:
                self._idle.append(worker)
        if not keep:
            worker.close()


def try_folder(folder: Path) -> None:
    """Read the tokenizer of a checkpoint in a process that is ended if it takes too long or too much memory.

    The caller can be interrupted by signals meanwhile.

    Raises:
        TokenizerError: it cannot be used.
    """
    try:
        _Worker(Source(folder=str(folder))).close()
    except _Ended as ended:
        _report(ended, f"{folder / 'tokenizer.json'} needs too much {{}} to be read", 0)
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} cannot be read: the process that read it was ended"
            + ("" if ended.by is None else f" by signal {ended.by}")
        ) from None


def _report(ended: _Ended, message: str, size: int) -> None:
    """Raise the error for a process that its limits have ended; do nothing for another one.

    One that was late by the clock may have been stopped: that says nothing of its task.

    Raises:
        TokenizerError: they have.
    """
    if ended.by == signal.SIGXCPU:
        raise TokenizerError(message.format("time", size)) from None
    # The library ends the process if it gets no memory.
    if ended.by in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS):
        raise TokenizerError(
            message.format(f"memory (more than {MEMORY_BYTES >> 30} GiB)", size)
        ) from None


def _checked(texts: Sequence[str]) -> list[str]:
    """Return the texts; raises TypeError as the library does for a lone surrogate."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise TypeError("a text has a lone surrogate") from None
    return list(texts)


def _wait(pipe: IO[bytes], event: Literal[1, 2] | int, deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, event)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise TimeoutError


def _environment() -> dict[str, str]:
    """Return the variables that Python and the library need: a child that reads foreign files gets no secrets."""
    kept = (
        "PATH",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSAFEPATH",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "LANG",
        "LC_ALL",
    )
    variables = {name: os.environ[name] for name in kept if name in os.environ}  # noqa: TID251 - handed on
    return variables | {
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "RUST_BACKTRACE": "0",
    }
