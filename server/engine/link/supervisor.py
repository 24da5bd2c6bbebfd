"""Starts the engine process, talks to it, and starts it again if it dies.

What the steps mean is its subclasses' business. Lives on one asyncio event loop; nothing here is thread-safe. Imports
no torch and knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from server.engine.link.launcher import EngineProcess
from server.engine.link.protocol import (
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
    add_counters,
)
from server.engine.link.spawn import ENGINE_COMMAND, EngineStartError, spawn

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

log = logging.getLogger("tessera.client")

# A crash loop must not eat the machine: the wait before a start doubles from the first to the second of these.
_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 30.0
_STOP_SECONDS = 5.0
# Taken together at most, so that an engine which is faster than we are cannot keep us from everything else.
_MOST_MESSAGES = 64


class EngineSupervisor:
    """Owns the engine process; a subclass owns the requests in flight.

    `launch` may be called before the event loop runs, so that the engine's slow imports overlap with ours;
    `start` then attaches to the loop.

    Attributes:
        state, phase: where the engine stands; the phase is for a person to read.
        info: what the engine that is or was ready told of itself.
        stats: its newest numbers.
        past: counters of the engine processes before it, added up.
        restarts: engine processes that were ready and ended.

    Args:
        config: what the engine is started with, now and after a crash.
        hang_seconds: an engine that is starting or has requests in flight, and is silent for so long,
            is killed and started again.
        command: starts an engine process.
        spawned: an engine process that was started already and is told nothing yet; None has one started.
    """

    def __init__(
        self,
        config: EngineConfig,
        hang_seconds: float = 300.0,
        command: Sequence[str] = ENGINE_COMMAND,
        spawned: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.config = config
        self._command = command
        self._spawned = spawned
        self.state = EngineState.STARTING
        self.phase = "importing PyTorch"
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.past = EngineStats()
        self.restarts = 0
        self._started: asyncio.Future[None] | None = None
        self._hang_seconds = hang_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._engine: EngineProcess | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_message = time.monotonic()
        self._backoff = _FIRST_BACKOFF_SECONDS
        self._tasks: set[asyncio.Task[None]] = set()

    def launch(self) -> None:
        """Start the engine process, or tell the one that was started; returns at once.

        Raises:
            EngineStartError: the operating system refuses.
        """
        process, self._spawned = self._spawned or spawn(self._command), None
        self._engine = EngineProcess(process, self.config, self._context)
        self._last_message = time.monotonic()

    async def start(self) -> None:
        """Attach to the running event loop; the engine may need seconds until it is ready."""
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        if self._engine is None:
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
        """End the engine process at once, without an event loop; does nothing after `stop`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._context.destroy(linger=0)

    async def stop(self) -> None:
        """End the engine and every request in flight."""
        was_ready = self.state is EngineState.READY
        self.state = EngineState.STOPPED
        self.phase = "shutting down"
        for task in self._tasks:
            task.cancel()
        self._on_loss("the server is shutting down")
        engine, self._engine = self._engine, None
        if engine is not None:
            self._detach(engine)
            if was_ready:  # before that it reads no messages, and has nothing to end in order
                with contextlib.suppress(zmq.ZMQError):
                    engine.requests.send(self._encoder.encode(Shutdown()), zmq.NOBLOCK)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(engine.process.wait, _STOP_SECONDS)
            engine.close()
        self._context.destroy(linger=0)

    def _has_requests(self) -> bool:
        """Whether the engine owes somebody tokens."""
        raise NotImplementedError

    def _on_steps(self, steps: list[tuple[bytes, StepMessage]]) -> None:
        """Take the messages of steps, as they came and decoded; `stats` is that of the last."""
        raise NotImplementedError

    def _on_change(self) -> None:
        """Take note that `state`, `phase`, `info` or `restarts` changed, if it matters."""

    def _on_loss(self, error: str) -> None:
        """End every request in flight: the engine is gone."""
        raise NotImplementedError

    def _send(self, message: FrontEndMessage) -> None:
        self._send_encoded(self._encoder.encode(message))

    def _send_encoded(self, data: bytes) -> None:
        if not self._has_requests():
            self._last_message = time.monotonic()  # it owed us nothing until now
        if self._engine is not None:
            # Again means that the engine is gone: `_on_exit` is about to end every request.
            with contextlib.suppress(zmq.Again):
                self._engine.requests.send(data, zmq.NOBLOCK)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _attach(self) -> None:
        loop, engine = self._loop, self._engine
        assert loop is not None
        assert engine is not None

        def wait_for_exit() -> None:
            engine.process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: we are past `stop`
                loop.call_soon_threadsafe(self._on_exit, engine)

        loop.add_reader(engine.steps_fd, self._receive, engine)
        # ZeroMQ's descriptor is edge-triggered: what came before `add_reader` makes no edge.
        loop.call_soon(self._receive, engine)
        threading.Thread(target=wait_for_exit, name="engine-exit", daemon=True).start()

    def _detach(self, engine: EngineProcess) -> None:
        assert self._loop is not None
        with contextlib.suppress(zmq.ZMQError, ValueError):
            self._loop.remove_reader(engine.steps_fd)

    def _receive(self, engine: EngineProcess) -> None:
        """Take what is there; the descriptor speaks up only once for all of it."""
        if self._take_messages(engine):
            assert self._loop is not None
            self._loop.call_soon(self._receive, engine)

    def _take_messages(self, engine: EngineProcess) -> bool:
        """Read messages, then hand over their steps: a slow front end so gets several together.

        Returns:
            Whether there may be more.
        """
        steps: list[tuple[bytes, StepMessage]] = []
        more = False
        for _ in range(_MOST_MESSAGES):
            more = engine is self._engine and self._take_message(engine, steps)
            if not more:
                break
        if steps and engine is self._engine:
            self.stats = steps[-1][1].stats
            self._on_steps(steps)
        return more

    def _take_message(self, engine: EngineProcess, steps: list[tuple[bytes, StepMessage]]) -> bool:
        try:
            data = engine.steps.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._last_message = time.monotonic()
        try:
            message = self._decoder.decode(data)
        except msgspec.DecodeError:
            log.exception("the engine sent a message that cannot be read; killing it")
            engine.process.kill()
            engine.process.wait()
            self._end(engine)
            return False
        if isinstance(message, StepMessage):
            steps.append((data, message))
        else:
            self._handle(message)
        return True

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, StartupPhase):
            self.phase = message.name
        elif isinstance(message, EngineReady):
            self.info = message.info
            self.past = add_counters(self.past, self.stats)
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
        self._on_change()

    def _on_start_failure(self, error: str) -> None:
        # Clients see the phase; the error may name paths of this machine and goes to the log alone.
        self.phase = "the engine could not start"
        if self.info is not None:
            log.error("the engine cannot start again: %s", error)
        elif self._started is not None and not self._started.done():
            self._started.set_exception(EngineStartError(error))

    def _on_exit(self, engine: EngineProcess) -> None:
        if engine is not self._engine or self.state is EngineState.STOPPED:
            return
        while self._take_messages(engine):  # what it said last, a reason perhaps
            pass
        if engine is self._engine:
            self._end(engine)

    def _end(self, engine: EngineProcess) -> None:
        """Clean up after a process that ended, and start another one if it had ever been ready."""
        self._detach(engine)
        self._engine = None
        # The counters stay: they are added to those of the next process.
        self.stats = msgspec.structs.replace(
            self.stats,
            num_running=0,
            num_waiting=0,
            num_free_blocks=self.stats.num_blocks,
            kv_usage=0.0,
        )
        code = engine.process.returncode
        engine.close()
        if self.info is None:
            self._on_start_failure(f"the engine process ended with code {code} while starting")
            self.state = EngineState.STOPPED
            self._on_change()
            return
        self.state = EngineState.RESTARTING
        self.restarts += 1
        wait, self._backoff = self._backoff, min(2 * self._backoff, _LONGEST_BACKOFF_SECONDS)
        self.phase = "starting again after the engine process ended"
        log.error("the engine process ended with code %s; starting it again in %.1f s", code, wait)
        self._on_loss("the engine stopped unexpectedly and is being started again")
        self._spawn(self._relaunch(wait))

    async def _relaunch(self, wait: float) -> None:
        while True:
            await asyncio.sleep(wait)
            try:
                self.launch()
            except EngineStartError as error:
                wait = min(2 * wait, _LONGEST_BACKOFF_SECONDS)
                log.error("%s; trying again in %.1f s", error, wait)
            else:
                self._attach()
                return

    async def _watch_for_hangs(self) -> None:
        """Kill an engine that owes us something, tokens or its start-up, and says nothing."""
        while True:
            await asyncio.sleep(min(1.0, self._hang_seconds / 4))
            silent = time.monotonic() - self._last_message
            owes = self._has_requests() or self.state is not EngineState.READY
            if owes and self._engine is not None and silent > self._hang_seconds:
                log.error(
                    "the engine is %s and silent for %.0f s; killing it", self.state.value, silent
                )
                self._engine.process.kill()
