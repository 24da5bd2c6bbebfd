"""The stages in which a front end ends: its health, whether it accepts requests, and which of them still run.

serving    requests are served
draining   the same, but health checks fail, so that load balancers send no more requests
refusing   new requests get 503; those in progress are completed
ending     requests that are left get an error
"""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, Final

from server.engine.link.protocol import EngineState

if TYPE_CHECKING:
    from server.engine.link.client import EngineHandle
    from server.http.config import HTTPConfig

_POLL_SECONDS: Final = 0.02


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
        num_active: requests in progress, without those of health checks.

    Args:
        client: the engine's client.
        config: durations of the stages.
    """

    def __init__(self, client: EngineHandle, config: HTTPConfig) -> None:
        self.stage = Stage.SERVING
        self.num_active = 0
        self._client = client
        self._config = config
        self._hurry = asyncio.Event()
        self._stop = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether the service is about to end, so that health checks must fail."""
        return self.stage is not Stage.SERVING

    def stop(self) -> None:
        """Begin to end; a second call ends the requests in progress at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self) -> None:
        """Wait for `stop`, then pass through the stages; returns when requests that are left must be ended."""
        await self._stop.wait()
        self.stage = Stage.DRAINING
        if self._client.state is EngineState.READY:  # otherwise health checks have failed before
            await self._wait(self._config.drain_delay_seconds, until_idle=False)
        self.stage = Stage.REFUSING
        await self._wait(self._config.drain_timeout_seconds, until_idle=True)
        self.stage = Stage.ENDING

    async def _wait(self, seconds: float, *, until_idle: bool) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self._hurry.is_set() and loop.time() < end:
            if until_idle and not self.num_active:
                return
            await asyncio.sleep(min(_POLL_SECONDS, seconds))
