"""Connects several front ends with the engine processes.

    front end 1 ─┐       ┌── engine process 0         a front end with requests on an engine gets all of its steps
    front end 2 ─┼── hub ┤                            and takes the tokens of its own; the others get statistics
    front end 3 ─┘       └── engine process 1         a few times per second

All requests pass through the hub, which chooses their engines (`engine_group`), and can therefore detect a hung engine
and abort the requests of a front end that died. It forwards steps as the bytes that it received: to divide one of 256
tokens takes 230 us, and a front end decodes it in 9. `server.cli.front_end.pool` starts the front ends.

Hub and front ends send each other heartbeats from their event loops. A front end that is silent, does not read or sends
what cannot be decoded is cut off, and the pool replaces it.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from server.engine.core.messages import AbortRequests, EngineConfig, StepMessage
from server.engine.core.progress import start_seconds
from server.engine.core.request import FinishReason
from server.engine.link.front_end.adapter_names import AdapterNames
from server.engine.link.front_end.engine_group import EngineGroup
from server.engine.link.protocol import (
    DECODE_ERRORS,
    AbortExternal,
    AbortStreams,
    AdapterProposal,
    AdapterVerdict,
    Attached,
    EngineState,
    EngineStatus,
    ExternalAborted,
    FrontEndHeartbeat,
    HubHeartbeat,
    RequestHeader,
    RequestPrompt,
    RequestsLost,
)
from server.engine.link.silence import SilenceTimer, tick_seconds
from server.engine.link.sockets import MAX_REQUEST_BYTES, Connection
from server.engine.link.spawn import ENGINE_COMMAND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from server.engine.link.spawn import LinkedProcess

# Request ids of one connection. The connection of a restarted front end has ids of its own.
_IDS_PER_CONNECTION = 1 << 40


# A front end that has left this many bytes of messages unread is too slow, or hangs, and is killed.
_MAX_UNREAD_BYTES = 256 * 2**20

# An engine's statistics change up to 500 times per second; front ends without requests on it get them this often.
_STATS_SECONDS = 0.05

_FrontEndMessage = (
    RequestHeader | AbortRequests | AbortExternal | Attached | FrontEndHeartbeat | AdapterProposal
)


@dataclass(eq=False, slots=True)
class FrontEndConnection:
    """The hub's side of the connection to one front end.

    Attributes:
        sockets: the sockets of the connection.
        first_id: first request id of the front end.
        on_attached: called once the front end receives messages.
        on_failure: called with the reason if the process must be replaced.
        silence: time since its last sign of life.
        attached: whether the front end receives messages.
        failed: whether `on_failure` was called; nothing is sent or received any more.
        heard: whether there was a message since the last look.
        sent_bytes, read_bytes: total size of the messages to it, and of those that it has handled.
        requests: for each engine, its requests in flight by id.
    """

    sockets: Connection
    first_id: int
    on_attached: Callable[[], None]
    on_failure: Callable[[str], None]
    silence: SilenceTimer
    requests: list[dict[int, RequestHeader]]
    attached: bool = False
    failed: bool = False
    heard: bool = False
    sent_bytes: int = 0
    read_bytes: int = 0

    def owns(self, request_ids: Iterable[int]) -> bool:
        """Return whether the ids are in the range of this front end."""
        return all(0 <= i - self.first_id < _IDS_PER_CONNECTION for i in request_ids)

    def all_requests(self) -> list[RequestHeader]:
        """Return its requests in flight on all engines."""
        return [request for requests in self.requests for request in requests.values()]


class EngineHub(EngineGroup):
    """Owns the engine processes and the connections to the front ends. For the arguments see `EngineGroup`.

    Attributes:
        adapter_names: decides the changes of adapters of all front ends; may be replaced before one is connected.
    """

    def __init__(
        self,
        config: EngineConfig,
        hang_seconds: float = 60.0,
        command: Sequence[str] = ENGINE_COMMAND,
        spawned: LinkedProcess | None = None,
        environments: Sequence[Mapping[str, str]] = ({},),
    ) -> None:
        super().__init__(config, hang_seconds, command, spawned, environments)
        self._encoder = msgspec.msgpack.Encoder()
        self._prompt_decoder = msgspec.msgpack.Decoder(RequestPrompt)
        self._stats_timer: asyncio.TimerHandle | None = None
        self._unsent_stats: set[int] = set()
        self._front_ends: list[FrontEndConnection] = []
        self._num_connections = 0
        self.adapter_names = AdapterNames()
        self._front_end_decoder = msgspec.msgpack.Decoder(_FrontEndMessage)

    def connect(
        self,
        descriptor: int,
        on_attached: Callable[[], None],
        on_failure: Callable[[str], None],
    ) -> FrontEndConnection:
        """Open the connection to a front end that is about to start.

        Args:
            descriptor: of the socket, which the connection owns from now on.
            on_attached: called once the front end receives messages.
            on_failure: called at most once if its process must be killed, with a text that completes the sentence
                "the front end ...". `disconnect` follows when the process has ended.

        Raises:
            OSError: the operating system refuses.
        """
        sockets = Connection(descriptor, MAX_REQUEST_BYTES)
        self._num_connections += 1
        first_id = self._num_connections * _IDS_PER_CONNECTION
        silence = SilenceTimer(tick_seconds(self.hang_seconds))
        requests: list[dict[int, RequestHeader]] = [{} for _ in self.engines]
        front_end = FrontEndConnection(
            sockets, first_id, on_attached, on_failure, silence, requests
        )
        self._front_ends.append(front_end)
        sockets.attach(
            asyncio.get_running_loop(), functools.partial(self._on_front_end_messages, front_end)
        )
        return front_end

    def disconnect(self, front_end: FrontEndConnection) -> None:
        """Close the connection to a front end that has ended, and abort its requests."""
        self._front_ends.remove(front_end)
        self._cut_off(front_end)

    def _cut_off(self, front_end: FrontEndConnection) -> None:
        """Close the connection, which drops what the front end has not read, and abort its requests."""
        front_end.sockets.close()
        for engine, requests in zip(self.engines, front_end.requests, strict=True):
            if requests:
                engine.send(AbortRequests(list(requests)))
                requests.clear()

    def _fail(self, front_end: FrontEndConnection, reason: str) -> None:
        if not front_end.failed:
            front_end.failed = True
            self._cut_off(front_end)
            front_end.on_failure(reason)

    def _check_front_ends(self) -> None:
        """Send heartbeats to the front ends, and replace those that are silent."""
        beat = self._encoder.encode(HubHeartbeat())
        for front_end in [f for f in self._front_ends if not f.failed]:
            front_end.sockets.drain()  # what arrived while this process was paused
            heard, front_end.heard = front_end.heard, False
            silent = front_end.silence.tick(alive=heard)
            limit = self.hang_seconds
            if not front_end.attached:
                limit = start_seconds(limit)
            if silent > limit:
                self._fail(front_end, f"has been silent for {silent:.1f} s")
            elif front_end.attached:
                self._send_to(front_end, beat)

    def _send_to(self, front_end: FrontEndConnection, data: bytes) -> None:
        if front_end.failed:
            return
        front_end.sockets.send(data)
        front_end.sent_bytes += len(data)
        unread = front_end.sent_bytes - front_end.read_bytes
        if unread > _MAX_UNREAD_BYTES:
            self._fail(front_end, f"has not read {unread} bytes")

    def _close(self) -> None:
        if self._stats_timer is not None:
            self._stats_timer.cancel()
        for front_end in self._front_ends:
            front_end.sockets.close()
        super()._close()

    def _on_front_end_messages(self, front_end: FrontEndConnection, batch: list[bytes]) -> None:
        front_end.heard = True
        for data in batch:
            if front_end.failed:
                return
            try:
                message = self._front_end_decoder.decode(data)
            except DECODE_ERRORS as error:
                self._fail(front_end, f"sent a message that cannot be decoded: {error}")
                return
            self._on_front_end_message(front_end, message, data)

    def _on_front_end_message(
        self, front_end: FrontEndConnection, message: _FrontEndMessage, data: bytes
    ) -> None:
        if isinstance(message, FrontEndHeartbeat):
            front_end.read_bytes = message.received_bytes
        elif isinstance(message, Attached):
            front_end.attached = True
            # Before the status, after which it serves.
            for change in self.adapter_names.changes():
                self._send_to(front_end, self._encoder.encode(change))
            self._send_to(front_end, self._status())
            front_end.on_attached()
        elif isinstance(message, AdapterProposal):
            self._change_adapters(front_end, message)
        elif isinstance(message, AbortRequests):
            if not front_end.owns(message.request_ids):
                self._fail(front_end, "sent ids of another front end's requests")
                return
            self._abort(front_end, message, data)
        elif isinstance(message, AbortExternal):
            self._abort_external(front_end, message)
        elif not front_end.owns([message.request_id]):
            self._fail(front_end, "sent the id of another front end's request")
        elif self.state is EngineState.READY:
            self._forward(front_end, message, data)
        else:
            # The front end has submitted it before it knew.
            lost = RequestsLost([message.request_id], self.phase)
            self._send_to(front_end, self._encoder.encode(lost))

    def _forward(self, front_end: FrontEndConnection, request: RequestHeader, data: bytes) -> None:
        """Send a request to the engine that is chosen for it."""
        try:
            engine = self._choose(lambda: self._prompt_decoder.decode(data))
        except DECODE_ERRORS as error:
            self._fail(front_end, f"sent a prompt that cannot be decoded: {error}")
            return
        engine.send_encoded(data)
        front_end.requests[engine.number][request.request_id] = request

    def _abort(self, front_end: FrontEndConnection, message: AbortRequests, data: bytes) -> None:
        """Forward an abort to the engines that have the requests; each ignores those of the others."""
        for engine, requests in zip(self.engines, front_end.requests, strict=True):
            if any(i in requests for i in message.request_ids):
                engine.send_encoded(data)
            if message.reason is FinishReason.ABORT:  # otherwise a last event follows
                _forget(requests, message.request_ids)

    def _abort_external(self, asking: FrontEndConnection, message: AbortExternal) -> None:
        """Make the front ends abort their requests with these names, and report which there are."""
        aborted: set[str] = set()
        for front_end in self._front_ends:
            found = [it for it in front_end.all_requests() if message.target.matches(it)]
            if found:
                ids = [request.request_id for request in found]
                self._send_to(front_end, self._encoder.encode(AbortStreams(ids)))
                aborted.update(request.external_id for request in found)
        self._send_to(asking, self._encoder.encode(ExternalAborted(message.serial, list(aborted))))

    def _change_adapters(self, asking: FrontEndConnection, message: AdapterProposal) -> None:
        refusal = self.adapter_names.decide(message.change, replaces=message.replaces)
        if refusal is None:
            self._broadcast(self._encoder.encode(message.change))
        self._send_to(asking, self._encoder.encode(AdapterVerdict(message.serial, refusal)))

    def _status(self) -> bytes:
        return self._encoder.encode(EngineStatus(engines=self.reports))

    def _broadcast(self, data: bytes) -> None:
        for front_end in self._front_ends:
            if front_end.attached:
                self._send_to(front_end, data)

    def has_requests(self, engine: int) -> bool:
        """Whether an engine has requests in flight."""
        return any(front_end.requests[engine] for front_end in self._front_ends)

    def _loads(self) -> list[int]:
        return [
            sum(len(front_end.requests[engine.number]) for front_end in self._front_ends)
            for engine in self.engines
        ]

    def on_steps(self, engine: int, steps: list[tuple[bytes, StepMessage]], /) -> None:
        """Forward steps to the front ends that have requests on the engine, and statistics to the others later."""
        for data, step in steps:
            for front_end in self._front_ends:
                if front_end.attached and front_end.requests[engine]:
                    self._send_to(front_end, data)
            if step.stats is not None:
                self._send_stats_later(engine)
        for _, step in steps:
            if any(step.finish_reasons):
                reasons = zip(step.request_ids, step.finish_reasons, strict=True)
                ended = [request_id for request_id, reason in reasons if reason]
                for front_end in self._front_ends:
                    _forget(front_end.requests[engine], ended)

    def _send_stats_later(self, engine: int) -> None:
        self._unsent_stats.add(engine)
        if self._stats_timer is None:
            loop = asyncio.get_running_loop()
            self._stats_timer = loop.call_later(_STATS_SECONDS, self._send_stats)

    def _send_stats(self) -> None:
        """Send the newest statistics of engines to the front ends that have no requests there."""
        self._stats_timer = None
        for engine in self._unsent_stats:
            stats = self.reports[engine].stats
            step = StepMessage(request_ids=[], token_ids=[], finish_reasons=[], stats=stats)
            data = self._encoder.encode(step)
            for front_end in self._front_ends:
                if front_end.attached and not front_end.requests[engine]:
                    self._send_to(front_end, data)
        self._unsent_stats.clear()

    def _on_change(self) -> None:
        self._broadcast(self._status())

    def _on_loss(self, engine: int, error: str) -> None:
        for front_end in self._front_ends:
            if requests := front_end.requests[engine]:
                self._send_to(front_end, self._encoder.encode(RequestsLost(list(requests), error)))
                requests.clear()


def _forget(requests: dict[int, RequestHeader], request_ids: Iterable[int]) -> None:
    """Drop requests that have ended; others are ignored."""
    for request_id in request_ids:
        requests.pop(request_id, None)
