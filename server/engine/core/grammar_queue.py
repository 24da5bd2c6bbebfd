"""The sequences whose grammar is being compiled."""

from __future__ import annotations

import concurrent.futures
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from model.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from model.sampling.parameters import SamplingParams
    from server.engine.core.grammar import Matcher
    from server.engine.core.sequence import Sequence

log = logging.getLogger("tessera.engine")

_MOST_STARTED: Final = 8
"""Compilations that are started and have not ended; the others wait here, where clients take turns."""
_WAIT_SECONDS: Final = 0.002
"""How long `take` waits; messages of the front end wait as long."""
_FAILED: Final = "the grammar cannot be compiled: an internal error"
_ATTEMPTS: Final = 3
"""Only a `GrammarError` says something about the grammar: after any other failure it is compiled again."""


class GrammarQueue:
    """Sequences that wait for their grammar while others run; they have no place and no blocks.

    Clients take turns, and the sequences of one client are compiled in order of arrival.

    Args:
        compile_grammar: starts to compile the grammar of a request on another thread.
    """

    def __init__(self, compile_grammar: Callable[[SamplingParams], Future[Matcher]]) -> None:
        self._compile = compile_grammar
        # With the number of attempts that are left.
        self._started: dict[int, tuple[Sequence, Future[Matcher], int]] = {}
        # By client, those whose turn is next first. No client without sequences.
        self._waiting: OrderedDict[str, OrderedDict[int, Sequence]] = OrderedDict()
        self._client_of: dict[int, str] = {}  # of those that wait

    def __len__(self) -> int:
        return len(self._started) + len(self._client_of)

    def add(self, sequence: Sequence) -> None:
        """Compile the grammar of a new sequence, when it is its turn."""
        assert sequence.sampling.grammar is not None
        self._client_of[sequence.request_id] = sequence.client
        queue = self._waiting.setdefault(sequence.client, OrderedDict())
        queue[sequence.request_id] = sequence
        self._start_next()

    def _start_next(self) -> None:
        while self._waiting and len(self._started) < _MOST_STARTED:
            client, queue = self._waiting.popitem(last=False)
            request_id, sequence = queue.popitem(last=False)
            if queue:
                self._waiting[client] = queue
            del self._client_of[request_id]
            self._start(sequence, _ATTEMPTS)

    def _start(self, sequence: Sequence, attempts: int) -> None:
        future: Future[Matcher]
        try:
            future = self._compile(sequence.sampling)
        except Exception as error:  # noqa: BLE001 - `take` logs it
            future = concurrent.futures.Future()
            future.set_exception(error)
        self._started[sequence.request_id] = sequence, future, attempts - 1

    def remove(self, request_id: int) -> bool:
        """Drop a sequence; returns whether it was waiting."""
        if (client := self._client_of.pop(request_id, None)) is not None:
            del self._waiting[client][request_id]
            if not self._waiting[client]:
                del self._waiting[client]
            return True
        is_started = self._started.pop(request_id, None) is not None
        self._start_next()
        return is_started

    def take(self, *, wait: bool) -> list[tuple[Sequence, str | None]]:
        """Remove the sequences whose compilation has ended.

        Args:
            wait: whether to wait for up to `_WAIT_SECONDS` for one.

        Returns:
            Sequences with their `matcher` set and None, or with the reason why they have none.
        """
        futures = [future for _, future, _ in self._started.values()]
        if wait:
            concurrent.futures.wait(futures, _WAIT_SECONDS, concurrent.futures.FIRST_COMPLETED)
        ended: list[tuple[Sequence, str | None]] = []
        for request_id, (sequence, future, attempts) in list(self._started.items()):
            if not future.done():
                continue
            del self._started[request_id]
            error = future.exception()
            if error is None:
                sequence.matcher = future.result()
                ended.append((sequence, None))
            elif isinstance(error, GrammarError):
                log.error("a grammar that was accepted cannot be compiled: %s", error)
                ended.append((sequence, f"the grammar cannot be compiled: {error}"))
            else:
                log.error("compiling a grammar failed", exc_info=error)
                if attempts:
                    self._start(sequence, attempts)
                else:
                    ended.append((sequence, _FAILED))
        self._start_next()
        return ended
