"""The sequences whose grammar is being compiled."""

from __future__ import annotations

import concurrent.futures
import logging
from typing import TYPE_CHECKING, Final

from model.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from model.sampling.parameters import SamplingParams
    from server.engine.core.grammar import Matcher
    from server.engine.core.sequence import Sequence

log = logging.getLogger("tessera.engine")

_WAIT_SECONDS: Final = 0.002
"""How long `take` waits; messages of the front end wait as long."""
_FAILED: Final = "the grammar cannot be compiled: an internal error"
_ATTEMPTS: Final = 3
"""Only a `GrammarError` says something about the grammar: after any other failure it is compiled again."""


class GrammarQueue:
    """Sequences that wait for their grammar while others run; in order of arrival.

    Args:
        compile_grammar: starts to compile the grammar of a request on another thread.
    """

    def __init__(self, compile_grammar: Callable[[SamplingParams], Future[Matcher]]) -> None:
        self._compile = compile_grammar
        self._waiting: dict[int, tuple[Sequence, Future[Matcher], int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Start to compile the grammar of a new sequence."""
        self._start(sequence, _ATTEMPTS)

    def _start(self, sequence: Sequence, attempts: int) -> None:
        assert sequence.sampling.grammar is not None
        future: Future[Matcher]
        try:
            future = self._compile(sequence.sampling)
        except Exception as error:  # noqa: BLE001 - `take` logs it
            future = concurrent.futures.Future()
            future.set_exception(error)
        self._waiting[sequence.request_id] = sequence, future, attempts - 1

    def remove(self, request_id: int) -> bool:
        """Drop a sequence; returns whether it was waiting."""
        return self._waiting.pop(request_id, None) is not None

    def take(self, *, wait: bool) -> list[tuple[Sequence, str | None]]:
        """Remove the sequences whose compilation has ended.

        Args:
            wait: whether to wait for up to `_WAIT_SECONDS` for one.

        Returns:
            Sequences with their `matcher` set and None, or with the reason why they have none.
        """
        futures = [future for _, future, _ in self._waiting.values()]
        if wait:
            concurrent.futures.wait(futures, _WAIT_SECONDS, concurrent.futures.FIRST_COMPLETED)
        ended: list[tuple[Sequence, str | None]] = []
        for request_id, (sequence, future, attempts) in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request_id]
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
        return ended
