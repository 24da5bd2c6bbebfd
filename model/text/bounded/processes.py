"""Tokenizes in other processes, which are ended when they take too long or too much memory.

Two kinds of tokenizers need it: one that nobody has read before, whose file may keep the library busy for ever, and one
whose time for a text is not bounded (`model.text.bounded.limits`). The library cannot be interrupted, and while it
reads a file it holds the interpreter lock, so that no signal is handled either.

The program is `model.text.bounded.program`, a helper process (`model.helper_process`): its first task says what
tokenizer to use, each later one has texts.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import tokenizers

from model.errors import TokenizerError
from model.helper_process.command import module_command
from model.helper_process.pool import HelperPool
from model.helper_process.process import (
    CrashError,
    HelperProcess,
    LostError,
    ProcessorTimeError,
)
from model.helper_process.steps import Steps, run_in_thread

READ_SECONDS: Final = 60
"""Processor time in which a tokenizer must be read. The largest in use take 3 s."""
TEXT_SECONDS: Final = 2.0
SECONDS_PER_BYTE: Final = 5e-6
"""Processor time for a text: five times what usual tokenizers take, and two seconds."""
MEMORY_BYTES: Final = 4 << 30

_MOST_IDLE: Final = 2
_COMMAND: Final = module_command("model.text.bounded.program")
_NAME: Final = "a process that tokenizes"


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


class EncoderProcesses:
    """Takes the place of a `tokenizers.Tokenizer` for tokenizing. Thread-safe.

    A thread that tokenizes uses one process, which is kept for the next text. A text that takes too long or too much
    memory ends its process and is an error. If a process is ended by anything else, the text is tokenized by another.

    Args:
        library: the tokenizer.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._source = Source(content=library.to_str())
        self._pool = HelperPool(_NAME, most_idle=_MOST_IDLE)
        self._is_closed = False
        self._related: list[EncoderProcesses] = []

    def like(self, library: tokenizers.Tokenizer) -> EncoderProcesses:
        """Return processes for another tokenizer with the same steps; they are closed with these."""
        processes = EncoderProcesses(library)
        self._related.append(processes)
        return processes

    def close(self) -> None:
        """End all processes. Texts that are being tokenized, and those that follow, are errors."""
        self._is_closed = True
        self._pool.end()
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
        work = functools.partial(_work, self._source, task, seconds)
        try:
            if self._is_closed:
                raise LostError
            answer = _run(self._pool, work, f"for a text of {size} bytes")
        except LostError:
            raise TokenizerError("the process of the tokenizer was ended") from None
        return [PlainEncoding(*it) for it in answer.encodings]


def try_folder(folder: Path) -> None:
    """Read the tokenizer of a checkpoint in a process that is ended if it takes too long or too much memory.

    The caller can be interrupted by signals meanwhile.

    Raises:
        TokenizerError: it cannot be used.
    """
    file, source = folder / "tokenizer.json", Source(folder=str(folder))
    pool = HelperPool(_NAME, most_idle=0)
    try:
        _run(
            pool,
            functools.partial(_work, source, None, 0.0),
            "to be read",
            f"{file} needs too much",
        )
    except LostError as error:
        raise TokenizerError(f"{file} cannot be read: the process that read it {error}") from None
    finally:
        pool.end()  # also after a signal: the process may be stopped


def _run(
    pool: HelperPool,
    work: Callable[[HelperProcess, bool], Steps[Answer]],
    what_for: str,
    what: str = "the tokenizer needs too much",
) -> Answer:
    """Return an answer of the program.

    Raises:
        TokenizerError: it reached a limit, or the answer is an error.
        LostError: there is none.
    """
    try:
        answer = run_in_thread(pool.run(lambda: HelperProcess(_COMMAND), work))
    except ProcessorTimeError:
        raise TokenizerError(f"{what} time {what_for}") from None
    except CrashError:  # the library ends the process if it gets no memory
        memory = f"memory (more than {MEMORY_BYTES >> 30} GiB)"
        raise TokenizerError(f"{what} {memory} {what_for}") from None
    if answer.error:
        raise TokenizerError(answer.error)
    return answer


def _work(
    source: Source, texts: Texts | None, seconds: float, process: HelperProcess, is_new: bool
) -> Steps[Answer]:
    """Have a new process read the tokenizer, and have it tokenize."""
    answer = Answer()
    if is_new:
        answer = yield from _ask(process, source, READ_SECONDS)
        if answer.error:
            process.close()
    if texts is not None and not answer.error:
        answer = yield from _ask(process, texts, seconds)
    return answer


def _ask(process: HelperProcess, task: Source | Texts, seconds: float) -> Steps[Answer]:
    reply = yield from process.ask(msgspec.msgpack.encode(task), seconds)
    try:
        return msgspec.msgpack.decode(reply.content, type=Answer)
    except msgspec.DecodeError as error:
        process.close()
        raise LostError(f"sent something else than an answer: {error}") from error


def _checked(texts: Sequence[str]) -> list[str]:
    """Return the texts; raises TypeError as the library does for a lone surrogate."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise TypeError("a text has a lone surrogate") from None
    return list(texts)
