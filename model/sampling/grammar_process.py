"""A process that follows the grammars of some sequences, next to others that follow those of the rest.

`model.sampling.grammar_processes` starts it as `python -m model.sampling.grammar_process` with the numbers of three
inherited file descriptors: a socket for steps, one for orders, and the memory of the masks. It ends with its parent,
since both sockets are closed then. Grammars are compiled in a thread of their own, so that steps do not wait for them.

A step is one packet of int32: a request, the number of matchers that are gone, their ids, then the rows, three numbers
each (id of the matcher, slot, token id). The reply has for each row its flags, the number of forced tokens, and those.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from collections import OrderedDict
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from model.errors import GrammarError, ModelError
from model.sampling.followed_matcher import MatcherRules
from model.sampling.grammar import GrammarMatcher, GrammarTokenizer, compile_matcher
from model.text.tokenizer import Tokenizer

Numbers = npt.NDArray[np.int32]

MOST_PACKET_NUMBERS: Final = 24_576
"""Numbers of a packet: Linux sends packets of twice this size with its usual limits."""
MOST_FORCED: Final = 256
"""Tokens that are followed for one row of a step; later ones are sampled where nothing else is allowed."""
_KEPT: Final = 64
_LENGTH: Final = struct.Struct("<I")

T = TypeVar("T")


ADVANCE, MASK, CONSUME, FORCED, COPY = range(5)
"""Requests: accept the token of each row ahead, with those that are forced after it, and compute the masks; compute the
mask of each row; and for one row: accept its token, return what is forced next, or copy its matcher to the id in the
place of the token. Plain numbers, since each step reads them for each row.
"""
REFUSED, STOPPED, FOLLOWED, FAILED = 1, 2, 4, 8
"""Flags of a row: attributes of `FollowedMatcher`, and whether the library failed."""


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """The first order.

    Attributes:
        folder: the checkpoint, with its tokenizer.
        vocab_size: see `GrammarTokenizer`.
        eos_token_ids: likewise.
        num_words: words of a mask.
    """

    folder: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_words: int


class Compile(msgspec.Struct, frozen=True, array_like=True):
    """An order: compile a grammar, and keep a matcher under an id.

    Attributes:
        matcher_id: the id; the reply has it too.
        grammar: serialized.
        rules: of the matcher.
    """

    matcher_id: int
    grammar: str
    rules: MatcherRules


class Explain(msgspec.Struct, frozen=True, array_like=True):
    """An order: say why a matcher cannot continue."""

    matcher_id: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The reply to an order.

    Attributes:
        matcher_id: of the order.
        text: why the grammar cannot be compiled, or why the matcher cannot continue; empty if it can.
    """

    matcher_id: int
    text: str


def send_order(connection: socket.socket, order: Any) -> None:  # noqa: ANN401 - a record
    """Send a record of this module."""
    data = msgspec.msgpack.encode(order)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_order(connection: socket.socket, kind: type[T]) -> T | None:
    """Wait for a record; None if the other end has closed the connection."""
    header = _receive_exactly(connection, _LENGTH.size)
    data = header and _receive_exactly(connection, _LENGTH.unpack(header)[0])
    return msgspec.msgpack.decode(data, type=kind) if data else None


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


class _CompileOrExplain(msgspec.Struct, frozen=True, array_like=True):
    """An order of either kind: `grammar` is None for `Explain`."""

    matcher_id: int
    grammar: str | None = None
    rules: MatcherRules = MatcherRules()


class GrammarProcess:
    """The matchers of this process.

    Args:
        setup: the first order.
        words: [S, num_words] int32, the masks by slot.
    """

    def __init__(self, setup: Setup, words: Numbers) -> None:
        self._words = list(words)
        self._addresses = [row.ctypes.data for row in words]
        self._end_ids: tuple[int, ...] = ()
        self._failure = ""
        self._tokenizer: GrammarTokenizer | None = None
        try:
            tokenizer = Tokenizer.from_folder(setup.folder)
            self._tokenizer = GrammarTokenizer(tokenizer, setup.vocab_size, setup.eos_token_ids)
            self._end_ids = self._tokenizer.eos_token_ids
        except ModelError as error:
            self._failure = str(error)
        self._matchers: dict[int, GrammarMatcher] = {}
        self._compiled: OrderedDict[str, GrammarMatcher] = OrderedDict()

    def serve_orders(self, orders: socket.socket) -> None:
        """Answer orders until the connection is closed."""
        while (order := receive_order(orders, _CompileOrExplain)) is not None:
            if order.grammar is None:
                text = self._matchers[order.matcher_id].error
            else:
                text = self._compile(order.matcher_id, order.grammar, order.rules)
            send_order(orders, Answer(order.matcher_id, text))

    def serve_steps(self, steps: socket.socket) -> None:
        """Answer packets until the connection is closed."""
        buffer = np.empty(2 * MOST_PACKET_NUMBERS, np.int32)
        while size := steps.recv_into(buffer.data):
            numbers = buffer[: size // buffer.itemsize].tolist()
            request, num_gone = numbers[:2]
            for matcher_id in numbers[2 : 2 + num_gone]:
                self._matchers.pop(matcher_id, None)
            reply: list[int] = []
            for at in range(2 + num_gone, len(numbers), 3):
                found = self._row(request, *numbers[at : at + 3])
                if len(reply) + len(found) > MOST_PACKET_NUMBERS:
                    steps.send(np.array(reply, np.int32).data)
                    reply = []
                reply += found
            if reply:
                steps.send(np.array(reply, np.int32).data)

    def _compile(self, matcher_id: int, grammar: str, rules: MatcherRules) -> str:
        """Keep a matcher of a grammar; return why that is not possible."""
        if self._tokenizer is None:
            return self._failure
        copy = None
        if (base := self._compiled.get(grammar)) is not None:
            self._compiled.move_to_end(grammar)
            copy = base.copy(rules)
        if copy is None or not copy.has_usable_caches:
            try:
                base = compile_matcher(self._tokenizer, grammar)
            except GrammarError as error:
                return str(error)
            copy = base.copy(rules)
            self._compiled[grammar] = base
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._matchers[matcher_id] = copy
        return ""

    def _row(self, request: int, matcher_id: int, slot: int, token_id: int) -> list[int]:
        """Answer for one row."""
        matcher = self._matchers[matcher_id]
        forced: list[int] = []
        try:
            if request == ADVANCE:
                matcher.follow(token_id, MOST_FORCED)
                forced = matcher.ahead[1:]
                matcher.ahead.clear()
            elif request == CONSUME:
                matcher.is_refused = not matcher.accept(token_id)
                matcher.has_stopped = matcher.library.is_stopped()
            elif request == FORCED:
                forced = matcher.forced_tokens()[:MOST_FORCED]
            elif request == COPY:
                self._matchers[token_id] = matcher.copy()
            if request <= MASK and not matcher.is_refused:
                matcher.write_mask(self._words[slot], self._addresses[slot], self._end_ids)
        except Exception as error:  # noqa: BLE001 - of a library; the other rows go on
            with contextlib.suppress(OSError):  # a full pipe does not block
                sys.stderr.write(f"following a grammar failed: {error!r}\n")
            return [FAILED, 0]
        flags = (
            (REFUSED if matcher.is_refused else 0)
            | (STOPPED if matcher.has_stopped else 0)
            | (FOLLOWED if matcher.is_followed else 0)
        )
        return [flags, len(forced), *forced]


def main() -> None:
    """Follow grammars until the parent closes the connections."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    steps, orders = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    memory = mmap.mmap(int(sys.argv[3]), 0)
    setup = receive_order(orders, Setup)
    if setup is None:
        return
    words = np.frombuffer(memory, np.int32).reshape(-1, setup.num_words)
    process = GrammarProcess(setup, words)
    threading.Thread(target=process.serve_orders, args=(orders,), daemon=True).start()
    process.serve_steps(steps)
    os._exit(0)  # the parent has gone, or does not need this process: nothing is left to write


if __name__ == "__main__":
    main()
