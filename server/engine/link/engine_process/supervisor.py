"""Supervises one engine process: connection, state, restarts and hang detection.

Imports no PyTorch.

The engine process watches itself (`watchdog`) and reports a step that does not end. This side detects what the process
cannot report: that it is silent, because it was stopped or holds Python's global lock, or idle in spite of requests.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

import msgspec

from server.engine.core.messages import (
    EngineConfig,
    EngineHung,
    EngineMessage,
    EngineReady,
    EngineStats,
    FrontEndMessage,
    Heartbeat,
    Shutdown,
    StartupFailed,
    StartupPhase,
    StepMessage,
    add_counters,
    newest_stats,
)
from server.engine.core.progress import Activity, start_seconds
from server.engine.link.child_process import ChildProcess, ChildStartError
from server.engine.link.protocol import DECODE_ERRORS, EngineLaunch, EngineReport, EngineState
from server.engine.link.silence import SilenceTimer, tick_seconds
from server.engine.link.sockets import Connection
from server.engine.link.spawn import DUMP_SECONDS, ENGINE_COMMAND, ask_for_stacks

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence

    from server.engine.link.spawn import LinkedProcess

log = logging.getLogger("tessera.client")

STOP_SECONDS = 5.0
"""Time in which an engine that is asked to end does so, or is killed."""
# A hung process that reported itself ends within this time, or is killed.
_EXIT_SECONDS = 8.0
# A killed process that still exists after this time waits for a device that does not answer.
_KILL_SECONDS = 30.0


class EngineOwner(Protocol):
    """Owns the requests in flight of one or more engines; a supervisor calls it on the event loop."""

    def has_requests(self, engine: int) -> bool:
        """Whether an engine has requests in flight."""

    def on_steps(self, engine: int, steps: list[tuple[bytes, StepMessage]], /) -> None:
        """Handle messages of an engine's steps, encoded and decoded; the report has the `stats` of the last one."""

    def on_change(self, engine: int) -> None:
        """Handle a change of an engine's report, other than of `stats`."""

    def on_loss(self, engine: int, error: str) -> None:
        """End an engine's requests in flight with an error, or send them elsewhere: the engine has lost them."""

    def on_failure(self, engine: int, reason: str) -> None:
        """Handle that a process ended or could not be started; it is started again later."""


class EngineSupervisor:
    """Owns an engine process and the connection to it; its owner has the requests in flight.

    `launch` may be called before the event loop runs, so that this process imports its modules while the engine process
    imports its own; `start` then attaches to the loop. Not thread-safe.

    Attributes:
        config, hang_seconds: see the arguments.
        report: the engine's state and statistics; `owner.on_change` is called after each change but of `stats`.

    Args:
        config: of the engine, for the first start and for restarts.
        owner: of the requests.
        hang_seconds: an engine that sends no heartbeat for this long, or is idle for this long while requests are in
            flight, is killed and restarted; also the limit of a step, see
            `server.engine.core.progress.Progress.allowed_seconds`.
        command: starts an engine process.
        environment: variables of the process that differ from those of this one.
        spawned: an engine process without a configuration, for the first start; None spawns one.
    """

    def __init__(
        self,
        config: EngineConfig,
        owner: EngineOwner,
        hang_seconds: float = 60.0,
        command: Sequence[str] = ENGINE_COMMAND,
        environment: Mapping[str, str] | None = None,
        spawned: LinkedProcess | None = None,
    ) -> None:
        self.report = EngineReport()
        self.config = config
        self._owner = owner
        several = config.num_engines > 1
        self._name = f"engine {config.engine}" if several else "engine"
        self._child = ChildProcess(
            f"process of engine {config.engine}" if several else "engine process",
            command,
            self._configure,
            self._on_exit,
            on_failure=self._on_failure,
            environment=environment,
            spawned=spawned,
        )
        self._connection: Connection | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: asyncio.Future[None] | None = None
        self.hang_seconds = hang_seconds
        self._heard = False  # since the last look
        self._beat: Heartbeat | None = None
        self._seen_beat: Heartbeat | None = None
        self._silence = SilenceTimer(tick_seconds(hang_seconds))
        self._idleness = SilenceTimer(tick_seconds(hang_seconds))
        self._hung = ""  # why the running process is about to end
        self._was_ready = False  # before it was stopped
        self._start_error = ""  # of the newest start, if that failed

    @property
    def number(self) -> int:
        """Number of the engine among those of the service."""
        return self.config.engine

    @property
    def is_ready(self) -> bool:
        """Whether the engine takes requests."""
        return self.report.state is EngineState.READY

    def launch(self) -> None:
        """Start the engine process and send it its configuration; returns at once.

        Raises:
            ChildStartError: the operating system refuses.
        """
        self._child.launch()

    def start(self) -> None:
        """Supervise from the running event loop, after a `launch` if there was none; does not wait for the engine.

        Raises:
            ChildStartError: the operating system refuses.
        """
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        if self._connection is not None:
            self._connection.attach(self._loop, self._on_messages)
        self._child.start()

    async def wait_until_ready(self) -> None:
        """Wait until the first start succeeds or fails.

        Raises:
            ChildStartError: the engine cannot start; there is no second attempt.
        """
        assert self._started is not None
        await asyncio.shield(self._started)

    def kill(self) -> None:
        """End the engine process at once; needs no event loop. Does nothing after `stop`."""
        self._child.kill()
        self._close()

    def refuse_requests(self) -> None:
        """Take no more requests, because the service ends; `stop` follows."""
        self._was_ready = self.is_ready
        self._set_state(EngineState.STOPPED, "the server is shutting down")

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End the engine process and all its requests in flight, after `refuse_requests`.

        Args:
            seconds: after which the process is killed.
        """
        self._owner.on_loss(self.number, self.report.phase)
        if self._was_ready:
            self.send(Shutdown())
        # While it starts, the engine reads no messages and has nothing to finish.
        await self._child.stop(seconds if self._was_ready else 0)
        self._close()

    def send(self, message: FrontEndMessage) -> None:
        """Send a message to the engine. It is lost if the process ends before it has read it."""
        self.send_encoded(self._encoder.encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send an encoded message; see `send`."""
        if self._connection is not None:
            self._connection.send(data)

    def _set_state(self, state: EngineState, phase: str) -> None:
        self.report.state, self.report.phase = state, phase
        self._owner.on_change(self.number)

    def _configure(self, process: LinkedProcess) -> bytes:
        self._connection = Connection(process.link.detach())
        if self._loop is not None:
            self._connection.attach(self._loop, self._on_messages)
        self._hung = ""
        self._beat = self._seen_beat = None
        self._silence.seconds = self._idleness.seconds = 0.0
        return msgspec.json.encode(
            EngineLaunch(
                link=process.link_descriptor, config=self.config, hang_seconds=self.hang_seconds
            )
        )

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _on_messages(self, batch: list[bytes]) -> None:
        """Handle messages of the engine; those of several steps are passed on together."""
        if self.report.state is EngineState.STOPPED or self._hung:
            return
        self._heard = True
        try:
            messages = [self._decoder.decode(data) for data in batch]
        except DECODE_ERRORS:
            log.exception("the %s sent a message that cannot be decoded", self._name)
            self._force_restart("sent a message that cannot be decoded", kill_after=0.0)
            return
        steps: list[tuple[bytes, StepMessage]] = []
        for data, message in zip(batch, messages, strict=True):
            if isinstance(message, StepMessage):
                steps.append((data, message))
            else:
                self._handle(message)
        if steps:
            if stats := newest_stats(step for _, step in steps):
                self.report.stats = stats
            try:
                self._owner.on_steps(self.number, steps)
            except Exception:
                # Some of the steps' tokens are lost: their requests must not wait for ever.
                log.exception("the %s sent a step that contradicts itself", self._name)
                self._force_restart("sent a step that contradicts itself", kill_after=0.0)

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, Heartbeat):
            self._beat = message
            return
        if isinstance(message, EngineHung):
            self._force_restart(f"has been {message.doing}", kill_after=_EXIT_SECONDS)
            return
        report = self.report
        if isinstance(message, StartupPhase):
            self._set_state(report.state, message.name)
        elif isinstance(message, EngineReady):
            report.info = message.info
            report.past = add_counters(report.past, report.stats)
            num_blocks = message.info.num_blocks
            report.stats = EngineStats(
                engine=self.number, num_blocks=num_blocks, num_free_blocks=num_blocks
            )
            self._child.report_success()
            self._start_error = ""
            self._set_state(EngineState.READY, "ready")
            if self._started is not None and not self._started.done():
                self._started.set_result(None)
        elif isinstance(message, StartupFailed):
            self._on_start_failure(message.error)

    def _on_start_failure(self, error: str) -> None:
        # Clients see the phase. The error may contain paths of this machine and goes to the log only.
        self._set_state(self.report.state, "the engine could not start")
        if self.report.info is not None:
            self._start_error = error
            log.error("the %s cannot restart: %s", self._name, error)
        elif self._started is not None and not self._started.done():
            prefix = f"{self._name}: " if self.config.num_engines > 1 else ""
            self._started.set_exception(ChildStartError(prefix + error))

    def _on_exit(self, code: int) -> bool:
        """Handle the end of the engine process; returns whether to restart it: only if an engine was ready before."""
        if self._connection is not None:
            self._connection.drain()  # the last messages may give a reason
            self._connection.close()
        # The counters stay: they are added to those of the next process.
        report = self.report
        report.stats = msgspec.structs.replace(
            report.stats,
            num_running=0,
            num_waiting=0,
            num_prefill_tokens=0,
            num_waiting_for_slots=0,
            waiting_by_length=[],
            waiting_tokens_by_length=[],
            waiting_output_by_length=[],
            num_free_blocks=report.stats.num_blocks,
            kv_usage=0.0,
        )
        if report.info is None:
            why = f": it {self._hung}" if self._hung else ""
            self._on_start_failure(f"the engine process ended with code {code} while starting{why}")
            self._set_state(EngineState.STOPPED, report.phase)
            return False
        report.restarts += 1
        self._set_state(EngineState.RESTARTING, "starting again after the engine process ended")
        self._owner.on_loss(
            self.number, "the engine stopped unexpectedly and is being started again"
        )
        return True

    def _on_failure(self, reason: str) -> None:
        self._owner.on_failure(self.number, self._start_error or reason)

    @property
    def is_hopeless(self) -> bool:
        """Whether another restart is unlikely to succeed."""
        return self._child.is_hopeless

    def give_up(self) -> None:
        """Start no process any more, and end all requests."""
        self._child.kill()
        self._set_state(EngineState.STOPPED, "the engine could not be started again")
        self._owner.on_loss(self.number, self.report.phase)

    def _force_restart(self, reason: str, kill_after: float) -> None:
        """End all requests and refuse new ones, since the engine process must end; it is then restarted.

        Args:
            reason: completes the sentence "the engine ...".
            kill_after: seconds after which the process is killed if it has not ended by itself.
        """
        process = self._child.process
        if process is None or self._hung:
            return
        log.error("the %s %s; restarting it", self._name, reason)
        self._hung = reason
        if self.report.info is not None:
            self._set_state(
                EngineState.RESTARTING, "starting again because the engine did not respond"
            )
            self._owner.on_loss(
                self.number, "the engine stopped responding and is being started again"
            )
        self._child.kill_after(kill_after)
        assert self._loop is not None
        self._loop.call_later(kill_after + _KILL_SECONDS, self._report_unkillable, process)

    def _report_unkillable(self, process: subprocess.Popen[bytes]) -> None:
        """Report a killed process that does not end as fatal, so that the whole service is restarted."""
        if process is self._child.process and self.report.state is not EngineState.STOPPED:
            log.critical("the engine process %d cannot be killed", process.pid)
            self._set_state(EngineState.STOPPED, "the engine process hangs and cannot be ended")

    def check(self) -> None:
        """Kill a process that is silent, or idle although there are requests. Call it once per `tick_seconds`."""
        if self._connection is not None:
            self._connection.drain()  # what arrived while this process was paused
        beat, seen, self._seen_beat = self._beat, self._seen_beat, self._beat
        heard, self._heard = self._heard, False
        ready = self.is_ready
        # A process that never sent a heartbeat may be silent while it has nothing to do.
        expected = not ready or beat is not None or self._owner.has_requests(self.number)
        if self._child.process is None or self._hung or not expected:
            heard = True
        silent = self._silence.tick(alive=heard)
        if silent > (self.hang_seconds if ready else start_seconds(self.hang_seconds)):
            self._ask_for_stacks()
            self._force_restart(f"has been silent for {silent:.1f} s", kill_after=DUMP_SECONDS)
            return
        idle = (
            ready
            and beat is not None
            and seen is not None
            and beat.activity == Activity.IDLE.value
            and beat.count == seen.count
            and self._owner.has_requests(self.number)
        )
        if (idle_for := self._idleness.tick(alive=not idle)) > self.hang_seconds:
            self._ask_for_stacks()
            self._force_restart(
                f"has been idle for {idle_for:.1f} s although there are requests",
                kill_after=DUMP_SECONDS,
            )

    def _ask_for_stacks(self) -> None:
        if self._child.process is not None:
            ask_for_stacks(self._child.process)
