"""Which kinds of step are recorded, and when the others will be.

A step takes the recording of its own kind, or of a larger one until that has been made. Recordings are made when there
is nothing else to do, those that were missed first, then in the order given; or after so many steps without that it
pays to wait for one. Knows nothing of what is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, Protocol, TypeVar

from model.device.replay import Replay

log = logging.getLogger("tessera.engine")

_PATIENCE: Final = 3
"""Steps of a kind that are launched kernel by kernel before its recording makes one wait, which takes as long as they
lose.
"""
_PATIENCE_WITH_A_LARGER: Final = 64
"""The same for steps that a larger kind's recording serves meanwhile."""


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

    def find(self, keys: Iterable[K], *, waits: bool = True) -> R | None:
        """Return the first kind that is recorded; the first of all is recorded next if it is another one.

        Args:
            keys: kinds that a step fits in, at least one, its own first.
            waits: whether a step waits for its own recording in the end, where there is never idle time.
        """
        own = None
        for key in keys:
            own = key if own is None else own
            kind = self._kinds.get(key)
            if kind is not None and kind.replay is not None:
                if key != own:
                    self._miss(own, _PATIENCE_WITH_A_LARGER if waits else None)
                return kind
        assert own is not None
        self._miss(own, _PATIENCE if waits else None)
        return None

    def record_next(self) -> bool:
        """Make the next recording that is waited for; return whether there was one."""
        if not self._waiting:
            return False
        self._record(self._waiting.pop(0))
        return True

    def _miss(self, key: K, patience: int | None) -> None:
        """Count a step without its own recording; the last of so many waits for it to be made, of None no step."""
        if self._closed:
            return
        if key in self._waiting:
            self._waiting.remove(key)
        self._waiting.insert(0, key)
        if patience is None:
            return
        self._num_missed[key] = self._num_missed.get(key, 0) + 1
        if self._num_missed[key] >= patience:
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
