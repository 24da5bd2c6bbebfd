"""Equal shares of something limited: what every limit of the HTTP layer does when several clients compete."""

from __future__ import annotations

from typing import Final

_MOST_RATIO: Final = 2
"""How many times a limit all clients together may hold: what is beyond it is for clients below their share."""


def allows(wanted: int, held: int, total: int, limit: int, num_clients: int) -> bool:
    """Return whether a client may hold more of something.

    A client alone may hold all. When all is held, a client still gets more up to an equal share, so that it need not
    wait until others give something back; these get no more until all together hold less than the limit.

    Args:
        wanted: how much more.
        held: how much the client holds.
        total: how much all clients hold.
        limit: how much they may hold.
        num_clients: clients that hold something, this one among them.
    """
    return total + wanted <= limit or (
        held + wanted <= limit // num_clients and total + wanted <= _MOST_RATIO * limit
    )


class Shares:
    """What clients hold of one thing in this process. Used only on the event loop.

    A client that holds nothing is forgotten.
    """

    __slots__ = ("_held", "total")

    def __init__(self) -> None:
        self.total = 0
        self._held: dict[str, int] = {}

    def allows(self, client: str, wanted: int, limit: int) -> bool:
        """Return whether a client may hold more; see `allows`."""
        if self.total + wanted <= limit:
            return True
        clients = self._held
        held = clients.get(client, 0)
        return allows(wanted, held, self.total, limit, len(clients) + (client not in clients))

    def add(self, client: str, amount: int) -> None:
        """Add to what a client holds; a negative amount takes away."""
        self.total += amount
        held = self._held.get(client, 0) + amount
        if held:
            self._held[client] = held
        else:
            self._held.pop(client, None)
