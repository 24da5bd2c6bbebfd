"""Records that the processes of a service exchange beside the engine's own messages (`server.engine.core.messages`)."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Final, Protocol

import msgspec

from server.engine.core.messages import EngineConfig, EngineInfo, EngineStats, StepMessage
from server.engine.core.request import AdapterRef

DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError)
"""What decoding a damaged message raises: msgspec reports text that is not UTF-8 by the second one."""


class EngineState(enum.Enum):
    """State of the engine process, as the front end sees it."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of an engine process: one line of JSON on its standard input.

    Attributes:
        link: descriptor of the `server.engine.link.sockets.Connection` to the parent, which the process inherits.
        config: of the engine.
        hang_seconds: see `server.engine.core.progress.Progress.allowed_seconds`.
    """

    link: int
    config: EngineConfig
    hang_seconds: float = 60.0


class EngineReport(msgspec.Struct, kw_only=True):
    """What is known about one of the service's engine processes. Its supervisor changes it.

    Attributes:
        state, phase: its state; the phase describes it for people.
        info: properties of the newest process that became ready; None before the first.
        stats: its newest statistics.
        past: sum of the counters of earlier processes.
        restarts: number of processes that were ready and have ended.
    """

    state: EngineState = EngineState.STARTING
    phase: str = "importing PyTorch"
    info: EngineInfo | None = None
    stats: EngineStats = EngineStats()
    past: EngineStats = EngineStats()
    restarts: int = 0


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """The state of the engines, from the hub to a front end: the first message, and one after each change.

    Attributes:
        engines: a report for each engine, by its number.
    """

    engines: list[EngineReport]


class RequestsLost(msgspec.Struct, frozen=True, tag="lost"):
    """No engine will answer these requests of the receiving front end, from the hub.

    Attributes:
        request_ids: of the requests.
        error: says why.
    """

    request_ids: list[int]
    error: str


class RequestHeader(msgspec.Struct, frozen=True, tag="generate"):
    """The part of a `GenerateRequest` that the hub needs; the other fields are not decoded."""

    request_id: int
    external_id: str = ""
    client: str = ""


class RequestPrompt(msgspec.Struct, frozen=True, tag="generate"):
    """The part of a `GenerateRequest` that the choice of an engine needs."""

    prompt_token_ids: list[int]
    cache_salt: str | None = None
    deterministic: bool = False
    adapter: AdapterRef | None = None

    @property
    def part(self) -> Hashable:
        """The part of the prefix cache that it uses."""
        return self.cache_salt, self.deterministic, self.digest

    @property
    def digest(self) -> str | None:
        """The digest of its adapter; None for none."""
        return None if self.adapter is None else self.adapter.digest


class AbortTarget(msgspec.Struct, frozen=True):
    """Which requests to abort.

    Attributes:
        external_ids: of the requests; None means all that have one.
        client: whose requests may be aborted; None for everybody's.
    """

    external_ids: frozenset[str] | None = None
    client: str | None = None

    def matches(self, request: NamedRequest) -> bool:
        """Return whether a request is to be aborted."""
        if self.client is not None and request.client != self.client:
            return False
        if self.external_ids is None:
            return bool(request.external_id)
        return request.external_id in self.external_ids


class NamedRequest(Protocol):
    """A request with the names that an abort uses; see `GenerateRequest`."""

    @property
    def external_id(self) -> str:
        """The id that the client knows it by; empty if it has none."""

    @property
    def client(self) -> str:
        """Who sent it."""


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """A front end is ready to receive the hub's messages."""


class HubHeartbeat(msgspec.Struct, frozen=True, tag="hub_beat"):
    """A sign of life of the hub, about once per second."""


class FrontEndHeartbeat(msgspec.Struct, frozen=True, tag="front_end_beat"):
    """A sign of life of a front end's event loop, about once per second.

    Attributes:
        received_bytes: total size of the messages that the front end has handled, so that the hub knows what it has not
            read.
    """

    received_bytes: int


class AbortExternal(msgspec.Struct, frozen=True, tag="abort_external"):
    """Abort requests of any front end by their external ids; from a front end to the hub.

    Attributes:
        serial: identifies the reply among those to the same front end.
        target: the requests.
    """

    serial: int
    target: AbortTarget


class AbortStreams(msgspec.Struct, frozen=True, tag="abort_streams"):
    """Abort these requests of the receiving front end; unknown ids are ignored."""

    request_ids: list[int]


class ExternalAborted(msgspec.Struct, frozen=True, tag="external_aborted"):
    """The hub's reply to `AbortExternal`.

    Attributes:
        serial: of the message that it answers.
        external_ids: of the requests that are being aborted.
    """

    serial: int
    external_ids: list[str]


class AdapterChange(msgspec.Struct, frozen=True, tag="adapter"):
    """An adapter is loaded or unloaded while the service runs: from the hub to all front ends, in one order.

    Attributes:
        name: by which requests choose it.
        adapter: loaded under the name; None if it was unloaded.
        rank: its largest rank.
    """

    name: str
    adapter: AdapterRef | None = None
    rank: int = 0


class AdapterRefusal(enum.Enum):
    """Why a change of adapters is not made: the name is in use, there are too many, or none has the name."""

    TAKEN = "taken"
    FULL = "full"
    UNKNOWN = "unknown"


class AdapterProposal(msgspec.Struct, frozen=True, tag="propose_adapter"):
    """A front end asks the hub for a change of adapters.

    Attributes:
        serial: identifies the reply among those to the same front end.
        change: that is made if the hub accepts it.
        replaces: whether an adapter may be loaded in place of another one of its name.
    """

    serial: int
    change: AdapterChange
    replaces: bool = False


class AdapterVerdict(msgspec.Struct, frozen=True, tag="adapter_verdict"):
    """The hub's reply to `AdapterProposal`, after the change if it was made.

    Attributes:
        serial: of the message that it answers.
        refusal: why the change was not made; None if it was.
    """

    serial: int
    refusal: AdapterRefusal | None = None


HubMessage = (
    EngineStatus
    | RequestsLost
    | StepMessage
    | AbortStreams
    | ExternalAborted
    | HubHeartbeat
    | AdapterChange
    | AdapterVerdict
)
