"""Holds the refusals of a client that retries at once, so that they take the event loop's time from no other client."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from server.engine.core.queue.recent_clients import RecentClients

if TYPE_CHECKING:
    from server.http.metrics.client_counts import ClientCounts

AT_ONCE: Final = 32
"""Refusals of a client that are answered at once, until it has had fewer for a while."""
PER_SECOND: Final = 20.0
"""Refusals of a client that are answered in a second, beyond those. One takes the event loop about a millisecond."""
MOST_SECONDS: Final = 5.0
"""How long a refusal is held at most: clients give up after 10 s or later, and a load balancer asks another service."""
MOST_OF_A_CLIENT: Final = 1024
MOST: Final = 4096
"""Refusals that are held at a time. Beyond that the one that has been held longest is answered."""
_INTERVAL: Final = 1.0 / PER_SECOND
_MOST_KNOWN: Final = 4096


class PacedRefusals:
    """Answers refusals of one client at a limited rate while it has company. Used only on one event loop.

    A client that waits as `Retry-After` says never notices. One that sends the next request as soon as one is refused
    has as many refusals a second as it has connections, divided by `MOST_SECONDS`, or `PER_SECOND` if that is more. The
    request is refused before it is held: it holds no place and no bytes, and its metrics are complete.

    Args:
        clients: what each client has in progress in all front ends; None if only this process is known.
    """

    def __init__(self, clients: ClientCounts | None = None) -> None:
        self._clients = clients
        self._recent = RecentClients()
        # When the last refusal of a client is or was due; those with the earliest notes first.
        self._due: OrderedDict[str, float] = OrderedDict()
        self._held: OrderedDict[asyncio.Future[None], str] = OrderedDict()
        self._of: dict[str, OrderedDict[asyncio.Future[None], None]] = {}

    @property
    def num_held(self) -> int:
        """How many refusals are held."""
        return len(self._held)

    def note(self, client: str) -> None:
        """Note that a client sends a request."""
        self._recent.note(client, asyncio.get_running_loop().time())

    async def hold(self, client: str) -> None:
        """Return when a refusal that was just decided may be answered.

        Args:
            client: whose request is refused, as `server.http.request_id.CurrentRequest.client`.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not self._has_company(client, now):
            return
        due = max(self._due.pop(client, -math.inf), now - AT_ONCE * _INTERVAL) + _INTERVAL
        self._due[client] = due = min(due, now + MOST_SECONDS)
        if len(self._due) > _MOST_KNOWN:
            self._due.popitem(last=False)
        if due <= now:
            return
        of_client = self._of.setdefault(client, OrderedDict())
        if len(of_client) >= MOST_OF_A_CLIENT:
            self._release(next(iter(of_client)))
        elif len(self._held) >= MOST:
            self._release(next(iter(self._held)))
        of_client = self._of.setdefault(client, of_client)
        held = loop.create_future()
        self._held[held] = client
        of_client[held] = None
        timer = loop.call_at(due, self._release, held)
        try:
            await held
        finally:  # cancelled when the service ends
            timer.cancel()
            self._release(held)

    def _has_company(self, client: str, now: float) -> bool:
        clients = self._clients
        return self._recent.has_other(client, now) or (
            clients is not None and clients.num_clients(client) > 1
        )

    def _release(self, held: asyncio.Future[None]) -> None:
        client = self._held.pop(held, None)
        if client is None:
            return
        of_client = self._of[client]
        del of_client[held]
        if not of_client:
            del self._of[client]
        if not held.done():
            held.set_result(None)
