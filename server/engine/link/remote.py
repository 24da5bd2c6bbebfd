"""The engine as one of several front ends sees it: at the other end of a line to the hub, which owns it.

Has for the HTTP layer what `server.engine.link.client` has. Lives on one asyncio event loop; imports no torch and knows
no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec
import zmq

from server.engine.link.protocol import (
    AbortRequests,
    Attached,
    EngineInfo,
    EngineState,
    EngineStats,
    EngineStatus,
    HubMessage,
    StepMessage,
)
from server.engine.link.submission import Submitter

if TYPE_CHECKING:
    from server.engine.core.request import GenerateRequest

log = logging.getLogger("tessera.client")

# Taken together at most, so that an engine which is faster than we are cannot keep us from everything else.
_MOST_MESSAGES = 64


class RemoteEngine(Submitter):
    """Owns the requests of this front end, and its end of the line.

    Args:
        address: of the line.
        first_id: of the requests; no other front end has any of the next 2**40.

    Attributes:
        state, phase, info, stats, past, restarts: as `EngineSupervisor` has them, in the hub.
    """

    def __init__(self, address: str, first_id: int) -> None:
        super().__init__(first_id)
        self.state = EngineState.STARTING
        self.phase = "starting a front end"
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.past = EngineStats()
        self.restarts = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._steps = self._context.socket(zmq.PULL)
        for socket, name in ((self._requests, "requests"), (self._steps, "steps")):
            socket.set_hwm(0)
            socket.linger = 0
            socket.connect(f"{address}-{name}")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(HubMessage)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Attach to the running event loop and to the hub; returns once the hub has told where the engine stands."""
        self._loop = asyncio.get_running_loop()
        self._told = self._loop.create_future()
        self._loop.add_reader(int(self._steps.fd), self._receive)
        self._loop.call_soon(self._receive)
        self._requests.send(self._encoder.encode(Attached()))
        await self._told

    def stop(self) -> None:
        """End every request in flight and close the line."""
        assert self._loop is not None
        self.state = EngineState.STOPPED
        self.phase = "shutting down"
        self._fail("the server is shutting down")
        self._loop.remove_reader(int(self._steps.fd))
        # What was said last, aborts, is worth a moment.
        self._context.destroy(linger=100)

    def _send(self, message: GenerateRequest | AbortRequests) -> None:
        with contextlib.suppress(zmq.Again):  # the hub is gone, and we are about to go
            self._requests.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _receive(self) -> None:
        """Take what is there, then hand over the steps; the descriptor speaks up only once for all of it."""
        steps: list[StepMessage] = []
        for _ in range(_MOST_MESSAGES):
            if self._steps.closed:
                return
            try:
                message = self._decoder.decode(self._steps.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            if isinstance(message, StepMessage):
                steps.append(message)
            else:
                self._take(steps)
                steps = []
                self._update(message)
        else:
            assert self._loop is not None
            self._loop.call_soon(self._receive)
        self._take(steps)

    def _take(self, steps: list[StepMessage]) -> None:
        if steps:
            self.stats = steps[-1].stats
            self._streams.take(steps)

    def _update(self, status: EngineStatus) -> None:
        self.state, self.phase = status.state, status.phase
        if self.info != status.info:
            self.info = status.info
        self.stats, self.past, self.restarts = status.stats, status.past, status.restarts
        if self._told is not None and not self._told.done():
            self._told.set_result(None)
        if status.lost is not None:
            self._fail(status.lost)

    def _fail(self, error: str) -> None:
        # A request that the hub reads only after the engine came back would run for nobody.
        if ended := self._streams.fail(error):
            self._send(AbortRequests(ended))
