"""Remembers what was found a short time ago, so that asking again costs nothing."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final, Generic, TypeVar

SECONDS: Final = 10.0
"""How long something is remembered."""
_MOST: Final = 4096

T = TypeVar("T")


class Recent(Generic[T]):
    """Values by names, each for `SECONDS`; at most `_MOST`, of which the oldest is forgotten first."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: str) -> T | None:
        """Return the value of a name, if it is remembered."""
        found = self._values.get(name)
        if found is None:
            return None
        until, value = found
        if time.monotonic() >= until:
            del self._values[name]
            return None
        return value

    def put(self, name: str, value: T) -> None:
        """Remember a value from now on."""
        self._values.pop(name, None)
        self._values[name] = time.monotonic() + SECONDS, value
        if len(self._values) > _MOST:
            self._values.popitem(last=False)

    def forget(self, name: str) -> None:
        """Forget the value of a name, if there is one."""
        self._values.pop(name, None)
