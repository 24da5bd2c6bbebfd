"""What the HTTP layer needs of an engine, wherever it is: `EngineClient` owns one, `RemoteEngine` shares one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from server.engine.core.request import GenerateRequest
    from server.engine.link.protocol import EngineInfo, EngineState, EngineStats
    from server.engine.link.request_stream import RequestStream


class EngineHandle(Protocol):
    """Where the engine stands, and the way to it.

    Attributes:
        state, phase: where it stands; the phase is for a person to read.
        info: what it told of itself when it was ready last; None before.
        stats: its newest numbers.
        past: counters of the engine processes before it, added up.
        restarts: how many of those there were.
    """

    state: EngineState
    phase: str
    info: EngineInfo | None
    stats: EngineStats
    past: EngineStats
    restarts: int

    def next_request_id(self) -> int:
        """A number that no other request has."""

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Hand a request to the engine.

        Raises:
            EngineUnavailableError: the engine is not ready.
        """
