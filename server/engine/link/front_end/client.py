"""The engine as a front end uses it: submits requests and distributes the events of each step to their streams.

Imports no PyTorch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from server.engine.core.messages import AbortRequests, StepMessage
from server.engine.core.request import FinishReason, GenerateRequest, TokenEvent
from server.engine.link.front_end.adapter_names import AdapterNames
from server.engine.link.front_end.combined import EngineReports
from server.engine.link.front_end.engine_group import EngineGroup
from server.engine.link.front_end.request_stream import RequestStream
from server.engine.link.front_end.restart_queue import RestartQueue
from server.engine.link.protocol import (
    DECODE_ERRORS,
    AbortExternal,
    AbortStreams,
    AbortTarget,
    AdapterChange,
    AdapterProposal,
    AdapterRefusal,
    AdapterVerdict,
    Attached,
    EngineReport,
    EngineState,
    EngineStatus,
    ExternalAborted,
    FrontEndHeartbeat,
    HubHeartbeat,
    HubMessage,
    RequestPrompt,
    RequestsLost,
)
from server.engine.link.silence import SilenceTimer, tick_seconds
from server.engine.link.sockets import Connection

log = logging.getLogger("tessera.client")

_LAST_SECONDS = 0.1


class EngineUnavailableError(Exception):
    """The engine accepts no requests at the moment; the text says why."""


class EngineHandle(EngineReports):
    """Owns the streams of a front end's requests in flight; the interface that the HTTP layer uses.

    Attributes:
        restart_queue: requests that wait for an engine to start again; its `seconds` may be set.
    """

    def __init__(self, first_id: int = 1) -> None:
        self.reports = [EngineReport()]
        self._ids = itertools.count(first_id)
        self._streams: dict[int, RequestStream] = {}
        self.restart_queue = RestartQueue()
        self._adapter_names = AdapterNames()
        self._on_adapter: Callable[[AdapterChange], None] = lambda _change: None

    def share_adapters(
        self, names: Iterable[str], on_change: Callable[[AdapterChange], None]
    ) -> None:
        """Take part in changes of the service's adapters; before `start`.

        Args:
            names: of those that the front end has.
            on_change: called with each change, in an order that all front ends have.
        """
        self._adapter_names, self._on_adapter = AdapterNames(names), on_change

    async def change_adapters(
        self, change: AdapterChange, *, replaces: bool = False
    ) -> AdapterRefusal | None:
        """Make a change in every front end of the service, in this one before the return.

        Args:
            change: see `AdapterChange`.
            replaces: whether an adapter may be loaded in place of another one of its name.

        Returns:
            None, or why the change was not made.
        """
        refusal = self._adapter_names.decide(change, replaces=replaces)
        if refusal is None:
            self._on_adapter(change)
        return refusal

    def next_request_id(self) -> int:
        """Return an id that no other request has."""
        return next(self._ids)

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Send a request to the engine, or let it wait while the engine is being started again.

        Raises:
            EngineUnavailableError: the engine is not ready, and the request cannot wait for it.
        """
        if not self.takes_requests:
            raise EngineUnavailableError(f"the engine is {self.state.value}: {self.phase}")
        stream = RequestStream(
            request.request_id, self.abort, self.stop_request, request.external_id, request.client
        )
        stream.request = request
        if self.state is EngineState.READY:
            self._streams[request.request_id] = stream
            self._send(request)
        else:
            stream.hold()
            self.restart_queue.add(stream)
        return stream

    @property
    def takes_requests(self) -> bool:
        """Whether the engine is ready, or being started again and requests can wait for it."""
        if self.state is EngineState.READY:
            return True
        return self.state is EngineState.RESTARTING and self.restart_queue.seconds > 0

    def abort(self, request_id: int) -> None:
        """Make the engine drop a request; unknown ids are ignored."""
        if request_id in self._streams:
            self._send(AbortRequests([request_id]))
            del self._streams[request_id]
        else:
            self.restart_queue.discard(request_id)

    async def abort_external(self, target: AbortTarget) -> set[str]:
        """Abort requests by the names that their clients know, whichever front end has submitted them.

        Their streams end with `FinishReason.ABORT`.

        Returns:
            The external ids of the aborted requests.
        """
        running = list(self._streams.values()) + self.restart_queue.streams
        streams = [stream for stream in running if target.matches(stream)]
        for stream in streams:
            stream.abort()
        return {stream.external_id for stream in streams}

    def stop_request(self, request_id: int) -> None:
        """Make the engine end a request whose text is complete; its last event follows. Unknown ids are ignored."""
        if request_id in self._streams:
            self._send(AbortRequests([request_id], FinishReason.STOP))

    def _send(self, message: GenerateRequest | AbortRequests) -> None:
        """Send a message about requests of `_streams`."""
        raise NotImplementedError

    def _deliver(self, steps: list[StepMessage]) -> None:
        """Distribute the events of steps; a reader gets its events of all steps in one call."""
        touched: list[RequestStream] = []
        now = time.perf_counter()
        try:
            for step in steps:
                self._distribute(step, touched)
        finally:  # also if a step is inconsistent: events that are not delivered now would never be
            for stream in touched:
                stream.deliver(now)

    def _distribute(self, step: StepMessage, touched: list[RequestStream]) -> None:
        streams = self._streams
        for started in step.started:
            if stream := streams.get(started.request_id):
                stream.start(started.queue_seconds, started.num_cached_tokens)
        for request_id, prompt_logprobs in step.prompt_logprobs.items():
            if stream := streams.get(request_id):
                stream.prompt_logprobs = prompt_logprobs
                stream.prompt_top_tokens = step.prompt_top_tokens.get(request_id)
        unusual = step.top_tokens or step.errors
        rows = range(len(step.request_ids))
        logprobs = map(step.logprobs.get, rows)
        columns = zip(
            rows, step.request_ids, step.token_ids, step.finish_reasons, logprobs, strict=True
        )
        for i, request_id, token_id, reason, logprob in columns:
            stream = streams.get(request_id)
            if stream is None:
                continue
            if unusual or reason:
                if stream.push(step.event(i)):
                    touched.append(stream)
                if reason:
                    del streams[request_id]
            else:  # the usual case, without the lookups of `event` and the call of `push`
                events = stream.events
                events.append(TokenEvent(token_id=token_id, logprob=logprob))
                if len(events) == 1:
                    touched.append(stream)

    def _fail(self, error: str, request_ids: Iterable[int] | None = None) -> None:
        """End requests in flight with an error, except those that may be sent to another engine process.

        Args:
            error: says why.
            request_ids: of the requests, of which unknown ones are ignored; None for all.
        """
        ids = list(self._streams) if request_ids is None else request_ids
        streams = [self._streams.pop(i) for i in ids if i in self._streams]
        may_resend = self.takes_requests
        if not may_resend:
            self.restart_queue.fail(error)
        for stream in streams:
            if may_resend and self.restart_queue.accepts(stream):
                self.restart_queue.add(stream)
                continue
            stream.push(TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=error))
            stream.deliver()
        self._serve_restart_queue()

    def _serve_restart_queue(self) -> None:
        """Send the waiting requests if the engine is ready; end them if it will not be.

        Must be called after a change of `state`.
        """
        if self.state is EngineState.STOPPED:
            self.restart_queue.fail(self.phase)
        if self.state is not EngineState.READY:
            return
        for stream in self.restart_queue.take():
            request = stream.request
            assert request is not None
            # Late events of an earlier process have the earlier id.
            stream.request_id = self.next_request_id()
            request = msgspec.structs.replace(request, request_id=stream.request_id)
            stream.request = request if stream.is_held else None  # None: was sent before
            self._streams[stream.request_id] = stream
            self._send(request)
            stream.release(accepted=True)


class EngineClient(EngineGroup, EngineHandle):
    """The engines of a single front end, which owns their processes. For the arguments see `EngineGroup`.

    If an engine process ends, its requests in flight that have output end with an error event. The others are sent to
    an engine that is ready, and end with an error if there is none in time.
    """

    def has_requests(self, engine: int) -> bool:
        """Whether an engine has requests in flight."""
        return any(stream.engine == engine for stream in self._streams.values())

    def on_steps(self, _engine: int, steps: list[tuple[bytes, StepMessage]], /) -> None:
        """Distribute the events of steps."""
        self._deliver([step for _, step in steps])

    def _send(self, message: GenerateRequest | AbortRequests) -> None:
        if isinstance(message, AbortRequests):
            for engine in {self._streams[i].engine for i in message.request_ids}:
                self.engines[engine].send(message)
            return
        chosen = self._choose(
            lambda: RequestPrompt(
                message.prompt_token_ids,
                message.cache_salt,
                message.deterministic,
                message.adapter,
            )
        )
        self._streams[message.request_id].engine = chosen.number
        chosen.send(message)

    def _loads(self) -> list[int]:
        loads = [0] * len(self.engines)
        for stream in self._streams.values():
            if stream.engine >= 0:
                loads[stream.engine] += 1
        return loads

    def _on_loss(self, engine: int, error: str) -> None:
        self._fail(error, [i for i, s in self._streams.items() if s.engine == engine])

    def _on_change(self) -> None:
        self._serve_restart_queue()


class RemoteEngine(EngineHandle):
    """The engines of one of several front ends, which reaches them through the hub. Not thread-safe.

    Attributes:
        hub_lost: done, with the reason, when the hub hangs; exists from `start` on. The state is `STOPPED` then.

    Args:
        descriptor: of the connection to the hub, which this object owns from now on.
        first_id: first request id; this and the next 2**40 - 1 ids belong to this front end.
        hang_seconds: a hub that sends nothing for this long is lost.
    """

    def __init__(self, descriptor: int, first_id: int, hang_seconds: float = 60.0) -> None:
        super().__init__(first_id)
        self.reports = [EngineReport(phase="starting a front end")]
        self._connection = Connection(descriptor)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(HubMessage)
        self._attached: asyncio.Future[None] | None = None
        self._serials = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self.hub_lost: asyncio.Future[str]
        self._hang_seconds = hang_seconds
        self._received_bytes = 0
        self._heard = False
        self._heartbeats: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Attach to the running event loop and wait for the hub's first status."""
        loop = asyncio.get_running_loop()
        self._attached = loop.create_future()
        self._connection.attach(loop, self._on_messages)
        self._connection.send(self._encoder.encode(Attached()))
        self.hub_lost = loop.create_future()
        self._heartbeats = asyncio.create_task(self._exchange_heartbeats())
        waiting: set[asyncio.Future[Any]] = {self._attached, self.hub_lost}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    def stop(self) -> None:
        """End all requests in flight and close the connection."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        running = list(self._streams)
        self._stop_engines("the server is shutting down")
        if running:
            self._send(AbortRequests(running))
        for reply in self._replies.values():
            reply.cancel()
        self._connection.flush(_LAST_SECONDS)  # the aborts
        self._connection.close()

    async def abort_external(self, target: AbortTarget) -> set[str]:
        """Abort in the hub, through which the requests of all front ends pass. See `EngineHandle`."""
        waiting = [stream for stream in self.restart_queue.streams if target.matches(stream)]
        for stream in waiting:
            stream.abort()
        found: set[str] = await self._ask(lambda serial: AbortExternal(serial, target))
        return found | {stream.external_id for stream in waiting}

    async def change_adapters(
        self, change: AdapterChange, *, replaces: bool = False
    ) -> AdapterRefusal | None:
        """See `EngineHandle.change_adapters`; the hub decides, and tells all front ends."""
        refusal: AdapterRefusal | None = await self._ask(
            lambda serial: AdapterProposal(serial, change, replaces)
        )
        return refusal

    async def _ask(self, question: Callable[[int], AbortExternal | AdapterProposal]) -> Any:  # noqa: ANN401 - by the question
        """Send a message with a serial number to the hub; return what its reply says."""
        serial = next(self._serials)
        reply = self._replies[serial] = asyncio.get_running_loop().create_future()
        self._connection.send(self._encoder.encode(question(serial)))
        try:
            return await reply
        finally:
            del self._replies[serial]

    def _send(self, message: GenerateRequest | AbortRequests) -> None:
        self._connection.send(self._encoder.encode(message))

    def _on_messages(self, batch: list[bytes]) -> None:
        """Handle messages of the hub in order; a stream gets its events of successive steps together."""
        self._heard = True
        self._received_bytes += sum(map(len, batch))
        if self.hub_lost.done():
            return
        try:
            messages = [self._decoder.decode(data) for data in batch]
        except DECODE_ERRORS as error:
            self._lose_hub(f"sent a message that cannot be decoded: {error}")
            return
        for is_step, group in itertools.groupby(messages, lambda m: isinstance(m, StepMessage)):
            if is_step:
                steps = [message for message in group if isinstance(message, StepMessage)]
                for step in steps:
                    if step.stats is not None:
                        self.reports[step.stats.engine].stats = step.stats
                self._deliver(steps)
            else:
                for message in group:
                    if not isinstance(message, StepMessage):
                        self._handle(message)

    async def _exchange_heartbeats(self) -> None:
        """Send heartbeats to the hub, and look for its own."""
        silence = SilenceTimer(tick_seconds(self._hang_seconds))
        while not self.hub_lost.done():
            await asyncio.sleep(tick_seconds(self._hang_seconds))
            try:
                self._connection.drain()  # what arrived while this process was paused
            except Exception:  # the hub must not be blamed for it
                log.exception("handling a message of the hub failed")
            self._connection.send(self._encoder.encode(FrontEndHeartbeat(self._received_bytes)))
            heard, self._heard = self._heard, False
            if (silent := silence.tick(alive=heard)) > self._hang_seconds:
                self._lose_hub(f"silent for {silent:.1f} s")

    def _lose_hub(self, reason: str) -> None:
        """Fail all requests, and report that the hub is of no more use."""
        self._stop_engines("the main process of the service does not respond")
        for reply in self._replies.values():
            reply.cancel()
        self.hub_lost.set_result(reason)

    def _stop_engines(self, phase: str) -> None:
        """End all requests: the engines can no longer be reached."""
        self.reports = [
            msgspec.structs.replace(report, state=EngineState.STOPPED, phase=phase)
            for report in self.reports
        ]
        self._fail(phase)

    def _handle(
        self,
        message: EngineStatus
        | RequestsLost
        | AbortStreams
        | ExternalAborted
        | HubHeartbeat
        | AdapterChange
        | AdapterVerdict,
    ) -> None:
        if isinstance(message, HubHeartbeat):
            return
        if isinstance(message, AdapterChange):
            self._on_adapter(message)
            return
        if isinstance(message, EngineStatus):
            self._update(message)
        elif isinstance(message, RequestsLost):
            self._fail(message.error, message.request_ids)
        elif isinstance(message, AbortStreams):
            for request_id in message.request_ids:
                if stream := self._streams.get(request_id):
                    stream.abort()
        elif (reply := self._replies.get(message.serial)) and not reply.done():
            if isinstance(message, AdapterVerdict):
                reply.set_result(message.refusal)
            else:
                reply.set_result(set(message.external_ids))

    def _update(self, status: EngineStatus) -> None:
        for old, new in zip(self.reports, status.engines, strict=False):
            if old.info == new.info:
                new.info = old.info  # the object is compared where it is used
        self.reports = status.engines
        if self._attached is not None and not self._attached.done():
            self._attached.set_result(None)
        self._serve_restart_queue()
