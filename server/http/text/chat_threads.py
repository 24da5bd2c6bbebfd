"""The threads in which conversations are rendered, shared among clients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

from model.text.rendering.renderer import MOST_PROCESSES, RENDERERS
from model.thread_pool import started_pool
from server.http.load.fair_queue import FairPlaces
from server.http.text.tokenizing import run_in_place

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")

_MOST_OF_A_CLIENT: Final = MOST_PROCESSES // 2


class ChatThreads:
    """Owns the threads, one for each process that renders. Used only on the event loop.

    A conversation may take a second. So one client has half of the threads at most, and where all are in use, clients
    take turns.

    Raises:
        ThreadStartError: the system refuses a thread.
    """

    def __init__(self) -> None:
        self._pool = started_pool(MOST_PROCESSES, "chat")
        self._places = FairPlaces(MOST_PROCESSES)
        self._clients: dict[str, _Share] = {}

    async def run(self, client: str, work: Callable[[], ResultT]) -> ResultT:
        """Call a function in a thread. If the caller is cancelled before the function runs, it never does.

        Args:
            client: whose request it is, as `server.http.request_id.CurrentRequest.client`.
            work: the function; must not use state that the event loop changes.
        """
        share = self._clients.get(client)
        if share is None:
            share = self._clients[client] = _Share(self._places, self._clients, client)
        await share.acquire()
        return await run_in_place(self._pool, share, work)

    def close(self) -> None:
        """Let the threads end, and the processes that render; work that has not begun is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        RENDERERS.end()


class _Share:
    """The threads of one client; in the table as long as a caller has one or waits for one."""

    def __init__(self, places: FairPlaces, clients: dict[str, _Share], client: str) -> None:
        self._own = asyncio.Semaphore(_MOST_OF_A_CLIENT)
        self._places, self._clients, self._client = places, clients, client
        self._callers = 0

    async def acquire(self) -> None:
        """Wait for a thread."""
        self._callers += 1
        try:
            await self._own.acquire()
            try:
                await self._places.acquire(self._client)
            except BaseException:
                self._own.release()
                raise
        except BaseException:
            self._leave()
            raise

    def release(self) -> None:
        """Give the thread back."""
        self._places.release()
        self._own.release()
        self._leave()

    def _leave(self) -> None:
        self._callers -= 1
        if not self._callers:
            del self._clients[self._client]
