"""Places that clients share: those that wait take turns by client."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from server.errors import OverloadedError


class FairPlaces:
    """A semaphore whose waiting callers are served by turns of their clients. Used only on one event loop.

    A free place is taken at once, whoever asks. When none is free, the clients that wait get the next ones in turn, one
    place each, and the callers of one client in order of arrival. So a client waits for at most one caller of each
    other client, however many callers these have.

    Args:
        count: number of places.
        most_of_a_client: how many of them one client may hold; None for all.
        most_waiting: limit of the waiting callers of one client; None for no limit.
        refusal: message of the error beyond that limit.
    """

    __slots__ = ("_free", "_held", "_most_of_a_client", "_most_waiting", "_refusal", "_waiting")

    def __init__(
        self,
        count: int,
        *,
        most_of_a_client: int | None = None,
        most_waiting: int | None = None,
        refusal: str = "too many requests of this client wait",
    ) -> None:
        self._free = count
        self._most_of_a_client = count if most_of_a_client is None else most_of_a_client
        self._held: dict[str, int] = {}  # by client; none of those that hold nothing
        self._most_waiting = most_waiting
        self._refusal = refusal
        # By client, those whose turn is next first. No client without callers.
        self._waiting: OrderedDict[str, OrderedDict[asyncio.Future[None], None]] = OrderedDict()

    def num_waiting(self, client: str) -> int:
        """Return how many callers of a client wait."""
        return len(self._waiting.get(client, ()))

    @property
    def num_clients(self) -> int:
        """How many clients wait."""
        return len(self._waiting)

    async def acquire(self, client: str) -> None:
        """Take a place, or wait for one. Whoever has taken a place calls `release`; a cancelled caller has none.

        Args:
            client: who asks, as `server.http.request_id.CurrentRequest.client`.

        Raises:
            OverloadedError: too many callers of the client wait already.
        """
        if self._free and self._may_hold(client):  # then nobody waits who may hold one more
            self._hold(client)
            return
        if self._most_waiting is not None and self.num_waiting(client) >= self._most_waiting:
            raise OverloadedError(self._refusal)
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, OrderedDict())[place] = None
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._forget(client, place)
            else:  # the place came in the same pass of the event loop
                self.release(client)
            raise

    def release(self, client: str) -> None:
        """Give a client's place to the caller whose turn it is, or back."""
        self._free += 1
        if self._held[client] == 1:
            del self._held[client]
        else:
            self._held[client] -= 1
        # A client that may not hold more is passed over: there are at most `count / most_of_a_client` of those.
        while (following := next(filter(self._may_hold, self._waiting), None)) is not None:
            if self._call(following):
                return

    def _call(self, client: str) -> bool:
        """Give a free place to the client's first caller that still waits; return whether there is one."""
        places = self._waiting.pop(client)
        while places:
            place, _ = places.popitem(last=False)
            if place.done():  # its caller was cancelled in this pass of the event loop
                continue
            if places:
                self._waiting[client] = places
            self._hold(client)
            place.set_result(None)
            return True
        return False

    def _may_hold(self, client: str) -> bool:
        return self._held.get(client, 0) < self._most_of_a_client

    def _hold(self, client: str) -> None:
        self._free -= 1
        self._held[client] = self._held.get(client, 0) + 1

    def _forget(self, client: str, place: asyncio.Future[None]) -> None:
        places = self._waiting.get(client)
        if places is not None:
            places.pop(place, None)
            if not places:
                del self._waiting[client]
