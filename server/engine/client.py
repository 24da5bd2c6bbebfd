"""The engine as a lone front end sees it: a process of its own, and the streams of its requests."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from server.engine.launcher import ENGINE_COMMAND, EngineStartError
from server.engine.protocol import AbortRequests, EngineState
from server.engine.stream import RequestStream
from server.engine.streams import StreamTable
from server.engine.supervisor import EngineSupervisor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.engine.protocol import EngineConfig, StepMessage
    from server.engine.request import GenerateRequest

__all__ = [
    "ENGINE_COMMAND",
    "EngineClient",
    "EngineStartError",
    "EngineUnavailableError",
    "RequestStream",
]


class EngineUnavailableError(Exception):
    """The engine takes no requests at the moment.

    Attributes:
        state: where the engine stands.
        phase: what it is doing, for a person to read.
    """

    def __init__(self, state: EngineState, phase: str) -> None:
        super().__init__(f"the engine is {state.value}: {phase}")
        self.state = state
        self.phase = phase


class EngineClient(EngineSupervisor):
    """Owns the engine process and every request in flight.

    Requests in flight when the engine dies end with an error event each.

    Args:
        config: as for `EngineSupervisor`.
        hang_seconds: likewise.
        command: likewise.
    """

    def __init__(
        self,
        config: EngineConfig,
        hang_seconds: float = 300.0,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        super().__init__(config, hang_seconds, command)
        self._streams = StreamTable()
        self._ids = itertools.count(1)

    def next_request_id(self) -> int:
        """A number that no other request of this front end has."""
        return next(self._ids)

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Hand a request to the engine.

        Raises:
            EngineUnavailableError: the engine is not ready.
        """
        if self.state is not EngineState.READY:
            raise EngineUnavailableError(self.state, self.phase)
        self._send(request)
        return self._streams.open(request.request_id, self.abort)

    def abort(self, request_id: int) -> None:
        """Make the engine forget a request; an unknown id is ignored."""
        if self._streams.close(request_id):
            self._send(AbortRequests([request_id]))

    def _has_requests(self) -> bool:
        return bool(self._streams)

    def _on_steps(self, steps: list[tuple[bytes, StepMessage]]) -> None:
        self._streams.take(step for _, step in steps)

    def _on_loss(self, error: str) -> None:
        self._streams.fail(error)
