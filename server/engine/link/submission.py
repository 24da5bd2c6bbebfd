"""How a front end hands requests to the engine, whatever line leads there. Knows no sockets and no processes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from server.engine.link.protocol import AbortRequests, EngineState
from server.engine.link.request_streams import StreamTable

if TYPE_CHECKING:
    from server.engine.core.request import GenerateRequest
    from server.engine.link.request_stream import RequestStream


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


class Submitter:
    """Owns the requests of a front end that are in the engine; a subclass has the line.

    Attributes:
        state, phase: where the engine stands; kept by the subclass.

    Args:
        first_id: of the requests.
    """

    state: EngineState
    phase: str

    def __init__(self, first_id: int) -> None:
        self._streams = StreamTable()
        self._ids = itertools.count(first_id)

    def next_request_id(self) -> int:
        """A number that no other request has."""
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

    def _send(self, message: GenerateRequest | AbortRequests) -> None:
        raise NotImplementedError
