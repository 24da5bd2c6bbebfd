"""Which kinds of step are recorded, and when the others will be.

A recording is made when there is nothing else to do, in the order given and those that were missed first, or after a
kind of step has been computed so often without one that it pays. Knows nothing of what is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, Protocol, TypeVar

from model.replay import Replay

log = logging.getLogger("tessera.engine")

_PATIENCE: Final = 32
"""Steps of a kind that are launched kernel by kernel before its recording may make a step wait."""


class Recorded(Protocol):
    """A kind of step: its arrays and, once made, its recording."""

    replay: Replay | None

    def record(self) -> Replay:
        """Record a step in which no sequence has a token: the same kernels run, and write to no block."""


K = TypeVar("K", bound=Hashable)
R = TypeVar("R", bound=Recorded)


class Recordings(Generic[K, R]):
    """The kinds of step that have been met or are waited for.

    Args:
        make: makes a kind of step, without its recording.
        first: kinds to record before any has been met.
    """

    def __init__(self, make: Callable[[K], R], first: Iterable[K]) -> None:
        self._make = make
        self._kinds: dict[K, R] = {}
        self._num_missed: dict[K, int] = {}
        self._waiting = list(first)
        self._closed = False

    @property
    def recorded(self) -> dict[K, R]:
        """The kinds that have a recording."""
        return {key: kind for key, kind in self._kinds.items() if kind.replay is not None}

    def find(self, key: K) -> R | None:
        """Return a kind that is recorded, or count that it was missed."""
        kind = self._kinds.get(key)
        if kind is not None and kind.replay is not None:
            return kind
        if not self._closed:
            self._miss(key)
        return None

    def record_next(self) -> bool:
        """Make the next recording that is waited for; return whether there was one."""
        if not self._waiting:
            return False
        self._record(self._waiting.pop(0))
        return True

    def _miss(self, key: K) -> None:
        self._num_missed[key] = self._num_missed.get(key, 0) + 1
        if key in self._waiting:
            self._waiting.remove(key)
        self._waiting.insert(0, key)
        if self._num_missed[key] >= _PATIENCE:
            self.record_next()

    def _record(self, key: K) -> None:
        if key not in self._kinds:
            self._kinds[key] = self._make(key)
        kind = self._kinds[key]
        if kind.replay is not None:
            return
        try:
            kind.replay = kind.record()
        except RuntimeError as error:
            # What cannot be recorded can be launched: the service goes on as it is.
            self._waiting.clear()
            self._closed = True
            log.warning("no more steps are recorded: %s failed: %s", key, error)
        else:
            log.debug("recorded %s", key)
