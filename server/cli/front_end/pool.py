"""The front-end processes of a service with several of them: starts, restarts and stops them."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING

import msgspec

from model.helper_process.command import module_command
from server.cli.front_end.config import STOP_SIGNAL, FrontEndConfig
from server.engine.link.child_process import ChildProcess, ChildStartError
from server.engine.link.front_end.adapter_names import AdapterNames
from server.engine.link.shared_file import shared_file
from server.engine.link.spawn import (
    DUMP_SECONDS,
    ask_for_stacks,
    ending_signals,
)
from server.http.metrics.registry import mark_process
from server.http.metrics.shared_counters import SharedCounters
from server.http.metrics.specs import NUM_CELLS

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from server.engine.link.front_end.hub import EngineHub, FrontEndConnection
    from server.engine.link.spawn import LinkedProcess
    from server.http.config import HTTPConfig
    from server.log import LogFormat

log = logging.getLogger("tessera")

FRONT_END_COMMAND = module_command("server.cli.front_end.process")
# For a front end, after the time that its requests have.
_STOP_SECONDS = 5.0
# For a front end after a second signal. Most need a tenth of a second; one that was stopped is killed.
_HURRIED_SECONDS = 2.4


class _FrontEnd:
    """Owns one front-end process and its connection to the hub.

    Attributes:
        serving: done when the process serves for the first time, or fails with a `ChildStartError`.

    Args:
        hub: of the service.
        inherited: descriptors that the process inherits.
        config: returns the configuration of the process, given `link` and `first_id`.
        on_failure: see `ChildProcess`.
    """

    def __init__(
        self,
        hub: EngineHub,
        inherited: Sequence[int],
        config: Callable[..., FrontEndConfig],
        on_failure: Callable[[str], None],
    ) -> None:
        self.serving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.child = ChildProcess(
            "front end", FRONT_END_COMMAND, self._configure, self._on_exit,
            on_failure=on_failure, pass_fds=inherited,
        )  # fmt: skip
        self._hub = hub
        self._config = config
        self._connection: FrontEndConnection

    def _configure(self, process: LinkedProcess) -> bytes:
        self._connection = self._hub.connect(
            process.link.detach(), self._on_attached, self._on_failure
        )
        config = self._config(link=process.link_descriptor, first_id=self._connection.first_id)
        return msgspec.json.encode(config)

    def _on_attached(self) -> None:
        self.child.report_success()
        if not self.serving.done():
            self.serving.set_result(None)

    def _on_failure(self, reason: str) -> None:
        log.error("a front end %s; restarting it", reason)
        if self.child.process is not None:
            ask_for_stacks(self.child.process)
        self.child.kill_after(DUMP_SECONDS)

    def _on_exit(self, code: int) -> bool:
        self._hub.disconnect(self._connection)
        if not self.serving.done():
            error = ChildStartError(f"a front end ended with code {code} while starting")
            self.serving.set_exception(error)
            return False
        return True


class FrontEndPool:
    """Owns the front-end processes; runs on the hub's event loop.

    Args:
        hub: connects the front ends with the engine process.
        listeners: a socket for each front end, all on one port. They stay open while a front end restarts, so that its
            connections wait instead of being refused.
        tokenizer_path: folder with the model's tokenizer.json.
        limits: of the service.
        log_format: of the front ends.
    """

    loop_factory = None

    def __init__(
        self,
        hub: EngineHub,
        listeners: list[socket.socket],
        tokenizer_path: Path,
        limits: HTTPConfig,
        log_format: LogFormat = "text",
        on_signal: Callable[[], object] = lambda: None,
    ) -> None:
        self._hub = hub
        hub.adapter_names = AdapterNames(it.ref.name for it in limits.adapters)
        self._note_signal = on_signal
        self._log_format = log_format
        self._listeners = listeners
        self._tokenizer_path = tokenizer_path
        self._limits = limits
        self._front_ends: list[_FrontEnd] = []
        self._stopping = asyncio.Event()
        self._num_signals = 0

    async def start(self) -> None:
        """Start the front ends and wait until all of them serve.

        Raises:
            ChildStartError: the operating system refuses a process or the memory of the counters, or a front end
                ended instead.
        """
        rows = len(self._listeners) + 1
        try:
            counters = shared_file(SharedCounters.num_bytes(rows, NUM_CELLS))
        except OSError as error:
            raise ChildStartError(f"no memory for the counters: {error}") from error
        # The last row is for this process, which uses time and memory too.
        mark_process(SharedCounters.shared(counters, rows, NUM_CELLS, rows - 1))
        for row, listener in enumerate(self._listeners):
            config = functools.partial(
                FrontEndConfig,
                listener=listener.fileno(),
                counters=counters,
                rows=rows,
                row=row,
                tokenizer_path=str(self._tokenizer_path),
                hang_seconds=self._hub.hang_seconds,
                http=self._limits,
                log_level=logging.getLevelName(logging.getLogger().level).lower(),
                log_format=self._log_format,
            )
            inherited = listener.fileno(), counters
            self._front_ends.append(_FrontEnd(self._hub, inherited, config, self._on_failure))
            self._front_ends[-1].child.start()
        await asyncio.gather(*(front_end.serving for front_end in self._front_ends))

    def _on_failure(self, reason: str) -> None:
        """Make the service end once no front end has been started for long."""
        if all(it.child.is_hopeless for it in self._front_ends):
            self._hub.fail(f"no front end could be started again: {reason}")

    async def run_until_stopped(self) -> None:
        """Wait for a signal or `stop`, then let the front ends end as `server.http.lifecycle` says.

        A second signal ends the requests in progress at once, and soon after front ends that do not react; a third one
        ends all of them at once.
        """
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self._on_signal)
        await self._stopping.wait()
        for listener in self._listeners:
            listener.close()  # the front ends have their own descriptors of these sockets
        limits = self._limits
        seconds = limits.drain_delay + limits.drain_timeout + _STOP_SECONDS
        await asyncio.gather(
            *(front_end.child.stop(seconds, STOP_SIGNAL) for front_end in self._front_ends)
        )

    def stop(self) -> None:
        """Make `run_until_stopped` stop the front ends."""
        self._stopping.set()

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._note_signal()
        for front_end in self._front_ends:
            if self._num_signals > 2:
                front_end.child.kill()
            elif self._num_signals == 2 and front_end.child.process is not None:
                front_end.child.process.send_signal(STOP_SIGNAL)
                front_end.child.kill_after(_HURRIED_SECONDS)
        self._stopping.set()
