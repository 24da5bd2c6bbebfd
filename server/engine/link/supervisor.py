"""Supervises the engine process: connection, state, restarts and hang detection.

Imports no PyTorch.

The engine process watches itself (`watchdog`) and reports a step that does not end. This side detects what the process
cannot report: that it is silent, because it was stopped or holds Python's global lock, or idle in spite of requests.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from server.engine.core.messages import (
    EngineConfig,
    EngineHung,
    EngineInfo,
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
from server.engine.link.protocol import DECODE_ERRORS, EngineLaunch, EngineState
from server.engine.link.silence import SilenceTimer, tick_seconds
from server.engine.link.socket_folder import SocketFolder
from server.engine.link.sockets import Connection
from server.engine.link.spawn import DUMP_SECONDS, ENGINE_COMMAND, ask_for_stacks

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

log = logging.getLogger("tessera.client")

_STOP_SECONDS = 5.0
# A hung process that reported itself ends within this time, or is killed.
_EXIT_SECONDS = 8.0
# A killed process that still exists after this time waits for a device that does not answer.
_KILL_SECONDS = 30.0


class EngineSupervisor:
    """Owns the engine process and the connection to it; a subclass owns the requests in flight.

    `launch` may be called before the event loop runs, so that this process imports its modules while the engine process
    imports its own; `start` then attaches to the loop. Not thread-safe.

    Attributes:
        state, phase: the engine's state; the phase describes it for people.
        info: properties of the newest engine that became ready.
        stats: its newest statistics.
        past: sum of the counters of earlier engine processes.
        restarts: number of engine processes that were ready and have ended.
        directory: holds the sockets; mode 0700, so that no other user can connect.
        hang_seconds: see the argument.

    Args:
        config: of the engine, for the first start and for restarts.
        hang_seconds: an engine that sends no heartbeat for this long, or is idle for this long while requests are in
            flight, is killed and restarted; also the limit of a step, see
            `server.engine.core.progress.Progress.allowed_seconds`.
        command: starts an engine process.
        spawned: an engine process without a configuration, for the first start; None spawns one.

    Raises:
        ChildStartError: the operating system refuses the directory.
    """

    def __init__(
        self,
        config: EngineConfig,
        hang_seconds: float = 60.0,
        command: Sequence[str] = ENGINE_COMMAND,
        spawned: subprocess.Popen[bytes] | None = None,
    ) -> None:
        super().__init__()  # the other base class of `EngineClient`
        self.config = config
        self.state = EngineState.STARTING
        self.phase = "importing PyTorch"
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.past = EngineStats()
        self.restarts = 0
        self._engine = ChildProcess(
            "engine process", command, self._configure, self._on_exit, spawned=spawned
        )
        self._connection: Connection | None = None
        self._num_connections = 0
        try:
            self._folder = SocketFolder()
        except OSError as error:
            raise ChildStartError(f"no directory for sockets: {error}") from error
        self.directory = self._folder.path
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: asyncio.Future[None] | None = None
        self.hang_seconds = hang_seconds
        self._hang_watch: asyncio.Task[None] | None = None
        self._heard = False  # since the last look
        self._beat: Heartbeat | None = None
        self._seen_beat: Heartbeat | None = None
        self._period = tick_seconds(hang_seconds)
        self._silence = SilenceTimer(self._period)
        self._idleness = SilenceTimer(self._period)
        self._hung = ""  # why the running process is about to end

    def launch(self) -> None:
        """Start the engine process and send it its configuration; returns at once.

        Raises:
            ChildStartError: the operating system refuses.
        """
        self._engine.launch()

    async def start(self) -> None:
        """Supervise from the running event loop, after a `launch` if there was none; does not wait for the engine.

        Raises:
            ChildStartError: the operating system refuses.
        """
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        if self._connection is not None:
            self._connection.attach(self._loop, self._on_messages)
        self._engine.start()
        self._hang_watch = asyncio.create_task(self._watch_for_hangs())

    async def wait_until_ready(self) -> None:
        """Wait until the first start succeeds or fails.

        Raises:
            ChildStartError: the engine cannot start; there is no second attempt.
        """
        assert self._started is not None
        await asyncio.shield(self._started)

    def kill(self) -> None:
        """End the engine process at once; needs no event loop. Does nothing after `stop`."""
        self._engine.kill()
        self._close()

    async def stop(self) -> None:
        """End the engine process and all requests in flight."""
        was_ready = self.state is EngineState.READY
        self.state = EngineState.STOPPED
        self.phase = "shutting down"
        if self._hang_watch is not None:
            self._hang_watch.cancel()
        self._on_loss("the server is shutting down")
        if was_ready:
            self._send(Shutdown())
        # While it starts, the engine reads no messages and has nothing to finish.
        await self._engine.stop(_STOP_SECONDS if was_ready else 0)
        self._close()

    def _has_requests(self) -> bool:
        """Whether requests are in flight."""
        raise NotImplementedError

    def _on_steps(self, steps: list[tuple[bytes, StepMessage]]) -> None:
        """Handle messages of steps, encoded and decoded; `stats` is that of the last one."""
        raise NotImplementedError

    def _on_change(self) -> None:
        """Handle a change of `state`, `phase`, `info` or `restarts`."""

    def _check_front_ends(self) -> None:
        """Called once per period, of `tick_seconds`."""

    def _on_loss(self, error: str) -> None:
        """End all requests in flight with an error: the engine has lost them."""
        raise NotImplementedError

    def _send(self, message: FrontEndMessage) -> None:
        self._send_encoded(self._encoder.encode(message))

    def _send_encoded(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.send(data)

    def _bind(self, max_bytes: int = -1) -> Connection:
        """Open a connection at a new address: ZeroMQ may remove the files of a closed one late."""
        self._num_connections += 1
        address = str(self.directory / str(self._num_connections))
        return Connection(address, parent=True, max_bytes=max_bytes)

    def _configure(self) -> bytes:
        self._connection = self._bind()
        if self._loop is not None:
            self._connection.attach(self._loop, self._on_messages)
        self._hung = ""
        self._beat = self._seen_beat = None
        self._silence.seconds = self._idleness.seconds = 0.0
        return msgspec.json.encode(
            EngineLaunch(
                address=self._connection.address,
                config=self.config,
                hang_seconds=self.hang_seconds,
            )
        )

    def _close(self) -> None:
        """Close all connections and remove the directory."""
        if self._connection is not None:
            self._connection.close()
        self._folder.remove()

    def _on_messages(self, batch: list[bytes]) -> None:
        """Handle messages of the engine; those of several steps are passed on together."""
        if self.state is EngineState.STOPPED or self._hung:
            return
        self._heard = True
        try:
            messages = [self._decoder.decode(data) for data in batch]
        except DECODE_ERRORS:
            log.exception("the engine sent a message that cannot be decoded")
            self._force_restart("sent a message that cannot be decoded", kill_after=0.0)
            return
        steps: list[tuple[bytes, StepMessage]] = []
        for data, message in zip(batch, messages, strict=True):
            if isinstance(message, StepMessage):
                steps.append((data, message))
            else:
                self._handle(message)
        if steps:
            self.stats = newest_stats(step for _, step in steps) or self.stats
            try:
                self._on_steps(steps)
            except Exception:
                # Some of the steps' tokens are lost: their requests must not wait for ever.
                log.exception("the engine sent a step that contradicts itself")
                self._force_restart("sent a step that contradicts itself", kill_after=0.0)

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, Heartbeat):
            self._beat = message
            return
        if isinstance(message, EngineHung):
            self._force_restart(f"has been {message.doing}", kill_after=_EXIT_SECONDS)
            return
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
            self._engine.reset_backoff()
            if self._started is not None and not self._started.done():
                self._started.set_result(None)
        elif isinstance(message, StartupFailed):
            self._on_start_failure(message.error)
        self._on_change()

    def _on_start_failure(self, error: str) -> None:
        # Clients see the phase. The error may contain paths of this machine and goes to the log only.
        self.phase = "the engine could not start"
        if self.info is not None:
            log.error("the engine cannot restart: %s", error)
        elif self._started is not None and not self._started.done():
            self._started.set_exception(ChildStartError(error))

    def _on_exit(self, code: int) -> bool:
        """Handle the end of the engine process; returns whether to restart it: only if an engine was ready before."""
        if self._connection is not None:
            self._connection.drain()  # the last messages may give a reason
            self._connection.close()
        # The counters stay: they are added to those of the next process.
        self.stats = msgspec.structs.replace(
            self.stats,
            num_running=0,
            num_waiting=0,
            num_prefill_tokens=0,
            waiting_by_length=[],
            waiting_tokens_by_length=[],
            num_free_blocks=self.stats.num_blocks,
            kv_usage=0.0,
        )
        if self.info is None:
            why = f": it {self._hung}" if self._hung else ""
            self._on_start_failure(f"the engine process ended with code {code} while starting{why}")
            self.state = EngineState.STOPPED
            self._on_change()
            return False
        self.state = EngineState.RESTARTING
        self.restarts += 1
        self.phase = "starting again after the engine process ended"
        self._on_loss("the engine stopped unexpectedly and is being started again")
        return True

    def _force_restart(self, reason: str, kill_after: float) -> None:
        """End all requests and refuse new ones, since the engine process must end; it is then restarted.

        Args:
            reason: completes the sentence "the engine ...".
            kill_after: seconds after which the process is killed if it has not ended by itself.
        """
        process = self._engine.process
        if process is None or self._hung:
            return
        log.error("the engine %s; restarting it", reason)
        self._hung = reason
        if self.info is not None:
            self.state = EngineState.RESTARTING
            self.phase = "starting again because the engine did not respond"
            self._on_loss("the engine stopped responding and is being started again")
            self._on_change()
        self._engine.kill_after(kill_after)
        assert self._loop is not None
        self._loop.call_later(kill_after + _KILL_SECONDS, self._report_unkillable, process)

    def _report_unkillable(self, process: subprocess.Popen[bytes]) -> None:
        """Report a killed process that does not end as fatal, so that the whole service is restarted."""
        if process is self._engine.process and self.state is not EngineState.STOPPED:
            log.critical("the engine process %d cannot be killed", process.pid)
            self.state = EngineState.STOPPED
            self.phase = "the engine process hangs and cannot be ended"
            self._on_change()

    async def _watch_for_hangs(self) -> None:
        """Look for hung processes once per period."""
        while True:
            await asyncio.sleep(self._period)
            try:
                if self._connection is not None:
                    self._connection.drain()  # what arrived while this process was paused
                self._check_engine()
                self._check_front_ends()
            except Exception:  # the watch must go on
                log.exception("looking for hung processes failed")

    def _check_engine(self) -> None:
        """Kill an engine process that is silent, or idle although there are requests."""
        beat, seen, self._seen_beat = self._beat, self._seen_beat, self._beat
        heard, self._heard = self._heard, False
        ready = self.state is EngineState.READY
        # A process that never sent a heartbeat may be silent while it has nothing to do.
        expected = not ready or beat is not None or self._has_requests()
        if self._engine.process is None or self._hung or not expected:
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
            and self._has_requests()
        )
        if (idle_for := self._idleness.tick(alive=not idle)) > self.hang_seconds:
            self._ask_for_stacks()
            self._force_restart(
                f"has been idle for {idle_for:.1f} s although there are requests",
                kill_after=DUMP_SECONDS,
            )

    def _ask_for_stacks(self) -> None:
        if self._engine.process is not None:
            ask_for_stacks(self._engine.process)
