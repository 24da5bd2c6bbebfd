"""The stages in which a front end ends: its health, whether it accepts requests, and which of them still run.

serving    requests are served
draining   the same, but health checks fail, so that load balancers send no more requests
refusing   new requests get 503; those in progress are completed
ending     requests that are left get an error
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from typing import TYPE_CHECKING, Any

from server.engine.link.protocol import EngineState

if TYPE_CHECKING:
    from server.engine.link.front_end.client import EngineHandle
    from server.http.config import HTTPConfig


class Stage(enum.IntEnum):
    """A stage of the module's table; it never goes back."""

    SERVING = 0
    DRAINING = 1
    REFUSING = 2
    ENDING = 3


class Lifecycle:
    """Owns the stage of a front end. Used only on its event loop.

    Attributes:
        stage: the current stage.
    """

    def __init__(self, client: EngineHandle, config: HTTPConfig) -> None:
        self.stage = Stage.SERVING
        self._client = client
        self._config = config
        self._requests: set[asyncio.Task[Any]] = set()
        self._stop = asyncio.Event()
        self._proceed = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether the service is about to end, so that health checks must fail."""
        return self.stage is not Stage.SERVING

    @property
    def is_ending(self) -> bool:
        """Whether requests are cancelled because the service ends, not because their clients have gone."""
        return self.stage is Stage.ENDING

    def add_request(self, task: asyncio.Task[Any]) -> None:
        """Note a request in progress, of any route but those of health checks."""
        self._requests.add(task)

    def remove_request(self, task: asyncio.Task[Any]) -> None:
        """Note the end of a request."""
        self._requests.discard(task)
        if self.stage is Stage.REFUSING and not self._requests:
            self._proceed.set()

    def cancel_requests(self) -> None:
        """Cancel the requests in progress, whose clients get an error."""
        for task in self._requests:
            task.cancel()

    def end(self) -> None:
        """Pass to the last stage at once, and cancel the requests in progress."""
        self.stage = Stage.ENDING
        self.cancel_requests()

    def stop(self) -> None:
        """Begin to end; a second call ends the requests in progress at once."""
        if self._stop.is_set():
            self._proceed.set()
        self._stop.set()

    async def run(self) -> None:
        """Wait for `stop`, then pass through the stages; returns when requests that are left must be ended."""
        await self._stop.wait()
        self.stage = Stage.DRAINING
        if self._client.state is EngineState.READY:  # otherwise health checks have failed before
            await self._wait(self._config.drain_delay)
        self.stage = Stage.REFUSING
        if self._requests:
            await self._wait(self._config.drain_timeout)
        self.stage = Stage.ENDING

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._proceed.wait()
