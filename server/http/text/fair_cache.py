"""The results of checks, of which no client can displace more than its share."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class FairCache(Generic[ValueT]):
    """Keeps values by their key. A value belongs to the client that caused it, and is found by all.

    When there is no room, the client with the most values loses the one that was used longest ago. So a client loses
    none while it has less than its equal share.

    Args:
        most: number of values.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[bytes, tuple[str, ValueT]] = {}
        # By client, the key that was used longest ago first. No client without keys.
        self._keys: dict[str, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> ValueT | None:
        """Return a value; None if there is none."""
        found = self._values.get(key)
        if found is None:
            return None
        self._keys[found[0]].move_to_end(key)
        return found[1]

    def put(self, key: bytes, value: ValueT, client: str) -> None:
        """Keep a value; one that is kept already stays as it is."""
        if key in self._values:
            return
        self._values[key] = client, value
        self._keys.setdefault(client, OrderedDict())[key] = None
        if len(self._values) > self._most:
            largest = max(self._keys, key=lambda it: len(self._keys[it]))
            dropped, _ = self._keys[largest].popitem(last=False)
            del self._values[dropped]
            if not self._keys[largest]:
                del self._keys[largest]
