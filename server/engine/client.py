"""The front end's side of the engine: starts the process, talks to it, starts it again when it dies or hangs.

Lives on one asyncio event loop; nothing here is thread-safe. Imports no torch and knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from server.engine.protocol import (
    AbortRequests,
    EngineConfig,
    EngineInfo,
    EngineMessage,
    EngineReady,
    EngineState,
    EngineStats,
    FrontEndMessage,
    Shutdown,
    StartupFailed,
    StartupPhase,
    StepMessage,
)
from server.engine.request import FinishReason, GenerateRequest, TokenEvent

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

log = logging.getLogger("tessera.client")

ENGINE_COMMAND = (sys.executable, "-m", "server.engine.process")
"""Starts an engine process; the socket folder is appended."""

# A crash loop must not eat the machine: the wait before a start doubles from the first to the second of these.
_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 30.0
_STOP_SECONDS = 5.0


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


class EngineStartError(Exception):
    """The engine could not start the first time; the text says why."""


class RequestStream:
    """The events of one request, in order; made by `EngineClient.submit`, read by one task.

    Iteration yields everything that is queued at once, so a slow reader gets longer lists, not a longer wait.
    The last list ends with an event that has a `finish_reason`.

    Attributes:
        num_cached_tokens: prompt tokens taken from the prefix cache; valid from the first event on.
        queue_seconds: time in the engine before the first step; valid from the first event on.
        prompt_logprobs: of prompt tokens 1.., if the request asked; valid from the first event on.
    """

    __slots__ = (
        "_client",
        "_events",
        "_finished",
        "_waiter",
        "num_cached_tokens",
        "prompt_logprobs",
        "queue_seconds",
        "request_id",
    )

    def __init__(self, client: EngineClient, request_id: int) -> None:
        self.request_id = request_id
        self.num_cached_tokens = 0
        self.queue_seconds = 0.0
        self.prompt_logprobs: list[float] | None = None
        self._client = client
        self._events: list[TokenEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """Wait for events; all that are queued come at once."""
        if not self._events:
            if self._finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events

    def abort(self) -> None:
        """Stop the request if it still runs; its blocks are freed. Calling it again does nothing."""
        if not self._finished:
            self._client.abort(self.request_id)
            self._push(TokenEvent(token_id=None, finish_reason=FinishReason.ABORT))

    def _push(self, event: TokenEvent) -> None:
        self._events.append(event)
        if event.finish_reason is not None:
            self._finished = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Incarnation:
    """One engine process with its sockets; when it ends, so does this."""

    def __init__(
        self,
        command: Sequence[str],
        config: EngineConfig,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self.directory = Path(
            tempfile.mkdtemp(prefix="tessera-")
        )  # mode 0700: nobody else can connect
        self.requests = context.socket(zmq.PUSH)
        self.steps = context.socket(zmq.PULL)
        for socket, name in ((self.requests, "requests"), (self.steps, "steps")):
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(f"ipc://{self.directory}/{name}")
        self.steps_fd = int(self.steps.fd)
        # Standard input carries the configuration, then stays open: its end tells the engine that we are gone.
        self.process = subprocess.Popen(  # noqa: S603 - our own command
            [*command, str(self.directory)], stdin=subprocess.PIPE
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(config) + b"\n")
            self.process.stdin.flush()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.requests.close()
        self.steps.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class EngineClient:
    """Owns the engine process and every request in flight.

    `launch` may be called before the event loop runs, so that the engine's slow imports overlap with ours;
    `start` then attaches to the loop. Requests in flight when the engine dies end with an error event each.

    Args:
        config: what the engine is started with, now and after a crash.
        hang_seconds: with requests in flight, an engine silent for so long is killed and started again.
        command: starts an engine process; takes the socket folder as its last argument.
    """

    def __init__(
        self,
        config: EngineConfig,
        hang_seconds: float = 300.0,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self.config = config
        self._command = command
        self.state = EngineState.STARTING
        self.phase = "starting the engine process"
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.restarts = 0
        self._started: asyncio.Future[None] | None = None
        self._hang_seconds = hang_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._streams: dict[int, RequestStream] = {}
        self._ids = itertools.count(1)
        self._incarnation: _Incarnation | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_message = time.monotonic()
        self._backoff = _FIRST_BACKOFF_SECONDS
        self._tasks: set[asyncio.Task[None]] = set()

    def launch(self) -> None:
        """Start the engine process; returns at once."""
        self._incarnation = _Incarnation(self._command, self.config, self._context)
        self._last_message = time.monotonic()

    async def start(self) -> None:
        """Attach to the running event loop; the engine may need seconds until it is ready."""
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        if self._incarnation is None:
            self.launch()
        self._attach()
        self._spawn(self._watch_for_hangs())

    async def wait_until_ready(self) -> None:
        """Wait for the first start to end.

        Raises:
            EngineStartError: the engine cannot start; it will not be tried again.
        """
        assert self._started is not None
        await asyncio.shield(self._started)

    def kill(self) -> None:
        """End the engine process at once, without an event loop; does nothing if it is gone."""
        incarnation, self._incarnation = self._incarnation, None
        if incarnation is not None:
            incarnation.close()

    async def stop(self) -> None:
        """End the engine and every request in flight."""
        self.state = EngineState.STOPPED
        self.phase = "shutting down"
        for task in self._tasks:
            task.cancel()
        self._fail_streams("the server is shutting down")
        incarnation, self._incarnation = self._incarnation, None
        if incarnation is not None:
            self._detach(incarnation)
            with contextlib.suppress(zmq.ZMQError):
                incarnation.requests.send(self._encoder.encode(Shutdown()), zmq.NOBLOCK)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(incarnation.process.wait, _STOP_SECONDS)
            incarnation.close()
        self._context.destroy(linger=0)

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
        if not self._streams:
            self._last_message = time.monotonic()
        stream = RequestStream(self, request.request_id)
        self._streams[request.request_id] = stream
        self._send(request)
        return stream

    def abort(self, request_id: int) -> None:
        """Make the engine forget a request; an unknown id is ignored."""
        if self._streams.pop(request_id, None) is not None:
            self._send(AbortRequests([request_id]))

    def _send(self, message: FrontEndMessage) -> None:
        if self._incarnation is not None:
            # Again means that the engine is gone: `_on_exit` is about to end every stream.
            with contextlib.suppress(zmq.Again):
                self._incarnation.requests.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _attach(self) -> None:
        loop, incarnation = self._loop, self._incarnation
        assert loop is not None
        assert incarnation is not None

        def wait_for_exit() -> None:
            incarnation.process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: we are past `stop`
                loop.call_soon_threadsafe(self._on_exit, incarnation)

        loop.add_reader(incarnation.steps_fd, self._receive, incarnation)
        # ZeroMQ's descriptor is edge-triggered: what came before `add_reader` makes no edge.
        loop.call_soon(self._receive, incarnation)
        threading.Thread(target=wait_for_exit, name="engine-exit", daemon=True).start()

    def _detach(self, incarnation: _Incarnation) -> None:
        assert self._loop is not None
        with contextlib.suppress(zmq.ZMQError, ValueError):
            self._loop.remove_reader(incarnation.steps_fd)

    def _receive(self, incarnation: _Incarnation) -> None:
        """Take every message that is there: the descriptor speaks up only once for all of them."""
        while incarnation is self._incarnation:
            try:
                data = incarnation.steps.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_message = time.monotonic()
            self._handle(self._decoder.decode(data))

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, StepMessage):
            self._dispatch(message)
        elif isinstance(message, StartupPhase):
            self.phase = message.name
        elif isinstance(message, EngineReady):
            self.info = message.info
            self.stats = EngineStats(
                num_blocks=self.info.num_blocks, num_free_blocks=self.info.num_blocks
            )
            self.state = EngineState.READY
            self.phase = "ready"
            self._backoff = _FIRST_BACKOFF_SECONDS
            if self._started is not None and not self._started.done():
                self._started.set_result(None)
        elif isinstance(message, StartupFailed):
            self._on_start_failure(message.error)

    def _dispatch(self, step: StepMessage) -> None:
        self.stats = step.stats
        streams = self._streams
        for started in step.started:
            if stream := streams.get(started.request_id):
                stream.queue_seconds = started.queue_seconds
                stream.num_cached_tokens = started.num_cached_tokens
        for request_id, logprobs in step.prompt_logprobs.items():
            if stream := streams.get(request_id):
                stream.prompt_logprobs = logprobs
        for i, request_id in enumerate(step.request_ids):
            stream = streams.get(request_id)
            if stream is None:
                continue
            stream._push(step.event(i))  # noqa: SLF001 - the client alone fills a stream
            if step.finish_reasons[i]:
                del streams[request_id]

    def _fail_streams(self, error: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream._push(TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=error))  # noqa: SLF001

    def _on_start_failure(self, error: str) -> None:
        # Clients see the phase; the error may name paths of this machine and goes to the log alone.
        self.phase = "the engine could not start"
        if self.info is not None:
            log.error("the engine cannot start again: %s", error)
        elif self._started is not None and not self._started.done():
            self._started.set_exception(EngineStartError(error))

    def _on_exit(self, incarnation: _Incarnation) -> None:
        if incarnation is not self._incarnation or self.state is EngineState.STOPPED:
            return
        self._receive(incarnation)  # what it said last, a reason perhaps
        self._detach(incarnation)
        self._incarnation = None
        code = incarnation.process.returncode
        incarnation.close()
        self._fail_streams("the engine stopped unexpectedly and is being started again")
        if self.info is None:
            self._on_start_failure(f"the engine process ended with code {code} while starting")
            self.state = EngineState.STOPPED
            return
        self.state = EngineState.RESTARTING
        self.restarts += 1
        wait, self._backoff = self._backoff, min(2 * self._backoff, _LONGEST_BACKOFF_SECONDS)
        self.phase = "starting again after the engine process ended"
        log.error("the engine process ended with code %s; starting it again in %.1f s", code, wait)
        self._spawn(self._relaunch(wait))

    async def _relaunch(self, wait: float) -> None:
        await asyncio.sleep(wait)
        self.launch()
        self._attach()

    async def _watch_for_hangs(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._hang_seconds / 4))
            silent = time.monotonic() - self._last_message
            if self._streams and self._incarnation is not None and silent > self._hang_seconds:
                log.error(
                    "the engine has been silent for %.0f s with requests in flight; killing it",
                    silent,
                )
                self._incarnation.process.kill()
