"""The clients that have sent a request lately: whether a client is alone."""

from __future__ import annotations

from typing import Final

RECENT_SECONDS: Final = 60.0
"""For so long after its last request, a client is expected to send another one."""
_MOST_KEPT: Final = 256


class RecentClients:
    """When clients have last sent a request. Of very many, only the latest are kept."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}  # the latest last

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, client: str, now: float) -> None:
        """Note that a client sends a request.

        Args:
            client: who.
            now: in seconds, on the clock of `has_other`; never less than before.
        """
        seen = self._seen
        seen.pop(client, None)
        seen[client] = now
        if len(seen) > _MOST_KEPT:
            del seen[next(iter(seen))]

    def has_other(self, client: str, now: float) -> bool:
        """Return whether another client has sent a request in the last `RECENT_SECONDS`."""
        for other in reversed(self._seen):
            if other != client:
                return self._seen[other] >= now - RECENT_SECONDS
        return False
