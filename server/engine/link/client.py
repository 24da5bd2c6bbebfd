"""The engine as a lone front end sees it: a process of its own, and the streams of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.engine.link.request_stream import RequestStream
from server.engine.link.spawn import ENGINE_COMMAND, EngineStartError
from server.engine.link.submission import EngineUnavailableError, Submitter
from server.engine.link.supervisor import EngineSupervisor

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from server.engine.link.protocol import EngineConfig, StepMessage

__all__ = [
    "ENGINE_COMMAND",
    "EngineClient",
    "EngineStartError",
    "EngineUnavailableError",
    "RequestStream",
]


class EngineClient(EngineSupervisor, Submitter):
    """Owns the engine process and every request in flight.

    Requests in flight when the engine dies end with an error event each.

    Args:
        config: as for `EngineSupervisor`.
        hang_seconds: likewise.
        command: likewise.
        spawned: likewise.
    """

    def __init__(
        self,
        config: EngineConfig,
        hang_seconds: float = 300.0,
        command: Sequence[str] = ENGINE_COMMAND,
        spawned: subprocess.Popen[bytes] | None = None,
    ) -> None:
        EngineSupervisor.__init__(self, config, hang_seconds, command, spawned)
        Submitter.__init__(self, first_id=1)

    def _has_requests(self) -> bool:
        return bool(self._streams)

    def _on_steps(self, steps: list[tuple[bytes, StepMessage]]) -> None:
        self._streams.take(step for _, step in steps)

    def _on_loss(self, error: str) -> None:
        self._streams.fail(error)
