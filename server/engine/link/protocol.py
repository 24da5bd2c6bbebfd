"""Records that the processes of a service exchange beside the engine's own messages (`server.engine.core.messages`)."""

from __future__ import annotations

import enum

import msgspec

from server.engine.core.messages import EngineConfig, EngineInfo, EngineStats, StepMessage


class EngineState(enum.Enum):
    """State of the engine process, as the front end sees it."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of an engine process: one line of JSON on its standard input.

    Attributes:
        address: of the `server.engine.link.sockets.Connection` to the parent.
        config: of the engine.
    """

    address: str
    config: EngineConfig


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """The engine's status, from the hub to a front end: the first message, and one after each change.

    Attributes:
        stats: newest statistics.
        past: sum of the counters of earlier engine processes.
        lost: why all requests in flight are lost; None if they are not.
    """

    state: EngineState
    phase: str
    info: EngineInfo | None
    stats: EngineStats
    past: EngineStats
    restarts: int
    lost: str | None = None


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """A front end is ready to receive the hub's messages."""


HubMessage = EngineStatus | StepMessage
