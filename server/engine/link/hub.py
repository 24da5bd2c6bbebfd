"""Connects several front ends with one engine process.

    front end 1 ─┐                                    every front end gets the messages of all steps
    front end 2 ─┼── hub ── engine process            and takes the tokens of its own requests
    front end 3 ─┘

All requests pass through the hub, which can therefore detect a hung engine and abort the requests of a front end that
died. It forwards steps as the bytes that it received. `server.cli.front_end_pool` starts the front ends.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from server.engine.core.messages import AbortRequests
from server.engine.core.request import FinishReason
from server.engine.link.protocol import (
    AbortExternal,
    AbortStreams,
    Attached,
    EngineState,
    EngineStatus,
    ExternalAborted,
    matches,
)
from server.engine.link.spawn import ENGINE_COMMAND
from server.engine.link.supervisor import EngineSupervisor

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Sequence

    from server.engine.core.messages import EngineConfig, StepMessage
    from server.engine.link.sockets import Connection

# Request ids of one connection. The connection of a restarted front end has ids of its own.
_IDS_PER_CONNECTION = 1 << 40


class _RequestHeader(msgspec.Struct, frozen=True, tag="generate"):
    """The part of a `GenerateRequest` that forwarding it needs; the other fields are not decoded."""

    request_id: int
    external_id: str = ""


_FrontEndMessage = _RequestHeader | AbortRequests | AbortExternal | Attached


@dataclass(eq=False, slots=True)
class FrontEndConnection:
    """The hub's side of the connection to one front end.

    Attributes:
        sockets: the sockets of the connection.
        first_id: first request id of the front end.
        on_attached: called once the front end receives messages.
        attached: whether the front end receives messages.
        external_ids: external ids of its requests in flight, by request id.
    """

    sockets: Connection
    first_id: int
    on_attached: Callable[[], None]
    attached: bool = False
    external_ids: dict[int, str] = field(default_factory=dict)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop requests that have ended; ids of other front ends are ignored."""
        for request_id in request_ids:
            self.external_ids.pop(request_id, None)


class EngineHub(EngineSupervisor):
    """Owns the engine process and the connections to the front ends. For the arguments see `EngineSupervisor`."""

    def __init__(
        self,
        config: EngineConfig,
        hang_seconds: float = 60.0,
        command: Sequence[str] = ENGINE_COMMAND,
        spawned: subprocess.Popen[bytes] | None = None,
    ) -> None:
        super().__init__(config, hang_seconds, command, spawned)
        self._front_ends: list[FrontEndConnection] = []
        self._front_end_decoder = msgspec.msgpack.Decoder(_FrontEndMessage)

    def connect(self, on_attached: Callable[[], None]) -> FrontEndConnection:
        """Open the connection to a front end that is about to start.

        Args:
            on_attached: called once the front end receives messages.

        Raises:
            OSError: the operating system refuses.
        """
        assert self._loop is not None
        sockets = self._bind()
        first_id = self._num_connections * _IDS_PER_CONNECTION
        front_end = FrontEndConnection(sockets, first_id, on_attached)
        self._front_ends.append(front_end)
        sockets.attach(self._loop, functools.partial(self._on_front_end_messages, front_end))
        return front_end

    def disconnect(self, front_end: FrontEndConnection) -> None:
        """Close the connection to a front end that has ended, and abort its requests."""
        self._front_ends.remove(front_end)
        front_end.sockets.close()
        if front_end.external_ids:
            self._send(AbortRequests(list(front_end.external_ids)))

    def _close(self) -> None:
        for front_end in self._front_ends:
            front_end.sockets.close()
        super()._close()

    def _on_front_end_messages(self, front_end: FrontEndConnection, batch: list[bytes]) -> None:
        for data in batch:
            message = self._front_end_decoder.decode(data)
            if isinstance(message, Attached):
                front_end.attached = True
                front_end.sockets.send(self._status())
                front_end.on_attached()
            elif isinstance(message, AbortRequests):
                if message.reason is FinishReason.ABORT:  # otherwise a last event follows
                    front_end.forget(message.request_ids)
                self._send_encoded(data)
            elif isinstance(message, AbortExternal):
                self._abort_external(front_end, message)
            elif self.state is EngineState.READY:
                # Otherwise the front end will receive the loss of the engine and end the request itself.
                self._send_encoded(data)
                front_end.external_ids[message.request_id] = message.external_id

    def _abort_external(self, asking: FrontEndConnection, message: AbortExternal) -> None:
        """Make the front ends abort their requests with these external ids, and report which there are."""
        wanted = None if message.external_ids is None else frozenset(message.external_ids)
        aborted: set[str] = set()
        for front_end in self._front_ends:
            found = {i: e for i, e in front_end.external_ids.items() if matches(e, wanted)}
            if found:
                front_end.sockets.send(self._encoder.encode(AbortStreams(list(found))))
                aborted.update(found.values())
        asking.sockets.send(self._encoder.encode(ExternalAborted(message.serial, list(aborted))))

    def _status(self, lost: str | None = None) -> bytes:
        return self._encoder.encode(
            EngineStatus(
                state=self.state,
                phase=self.phase,
                info=self.info,
                stats=self.stats,
                past=self.past,
                restarts=self.restarts,
                lost=lost,
            )
        )

    def _broadcast(self, data: bytes) -> None:
        for front_end in self._front_ends:
            if front_end.attached:
                front_end.sockets.send(data)

    def _has_requests(self) -> bool:
        return any(front_end.external_ids for front_end in self._front_ends)

    def _on_steps(self, steps: list[tuple[bytes, StepMessage]]) -> None:
        for data, _ in steps:
            self._broadcast(data)
        for _, step in steps:
            if any(step.finish_reasons):
                reasons = zip(step.request_ids, step.finish_reasons, strict=True)
                ended = [request_id for request_id, reason in reasons if reason]
                for front_end in self._front_ends:
                    front_end.forget(ended)

    def _on_change(self) -> None:
        self._broadcast(self._status())

    def _on_loss(self, error: str) -> None:
        for front_end in self._front_ends:
            front_end.external_ids.clear()
        self._broadcast(self._status(error))
