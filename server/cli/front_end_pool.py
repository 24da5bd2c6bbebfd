"""A service of several front-end processes: starts them, and starts one again that ended.

Knows neither routes nor steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from server.cli.front_end_config import FrontEndConfig
from server.http.metrics.registry import NUM_CELLS, mark_process
from server.http.metrics.shared_counters import SharedCounters

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from server.engine.link.hub import EngineHub, Line
    from server.http.config import HTTPConfig

log = logging.getLogger("tessera")

FRONT_END_COMMAND = (sys.executable, "-m", "server.cli.front_end")
# The wait before a front end is started again doubles from the first to the second of these.
_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 30.0
# More than the front ends themselves give the requests in flight.
_STOP_SECONDS = 35.0


class FrontEndStartError(Exception):
    """A front end ended before it ever served; the text says how."""


@dataclass(slots=True)
class _Member:
    """One front end.

    Attributes:
        row: of the board.
        process: that serves now; None between two.
        serving: whether that process reads its line.
    """

    row: int
    listener: socket.socket
    process: subprocess.Popen[bytes] | None = None
    line: Line | None = None
    serving: bool = False
    backoff: float = _FIRST_BACKOFF_SECONDS


class Fleet:
    """Owns the front-end processes; lives on the hub's event loop.

    Args:
        hub: that the front ends are attached to.
        listeners: a socket for each front end, all on one port. They stay open while a front end is started again,
            so that its connections wait instead of being refused.
        tokenizer_path: folder with the model's tokenizer.json.
        limits: of the service.
    """

    def __init__(
        self,
        hub: EngineHub,
        listeners: list[socket.socket],
        tokenizer_path: Path,
        limits: HTTPConfig,
    ) -> None:
        self._hub = hub
        self._tokenizer_path = tokenizer_path
        self._limits = limits
        self._board = hub.directory / "board"
        self._members = [_Member(row, listener) for row, listener in enumerate(listeners)]
        self._loop = asyncio.get_running_loop()
        self._serving: asyncio.Future[None] = self._loop.create_future()
        self._stopping = False
        # The last row is ours: we answer nothing, but take time and memory.
        mark_process(
            SharedCounters.shared(self._board, len(listeners) + 1, NUM_CELLS, len(listeners))
        )

    def start(self) -> None:
        """Start every front end; returns at once.

        Raises:
            FrontEndStartError: the operating system refuses.
        """
        for member in self._members:
            try:
                self._launch(member)
            except OSError as error:
                raise FrontEndStartError(f"a front end cannot be started: {error}") from error

    async def wait_until_serving(self) -> None:
        """Wait until all of them serve.

        Raises:
            FrontEndStartError: one ended instead.
        """
        await asyncio.shield(self._serving)

    async def stop(self) -> None:
        """Let every front end answer what it has in flight, and end."""
        self._stopping = True
        processes = [member.process for member in self._members if member.process is not None]
        for member in self._members:
            member.listener.close()  # from now on connections are refused
        for process in processes:
            process.send_signal(signal.SIGTERM)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.kill)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.gather(
                    *(asyncio.to_thread(process.wait, _STOP_SECONDS) for process in processes)
                )

    def kill(self) -> None:
        """End every front end at once."""
        self._stopping = True
        for member in self._members:
            process, member.process = member.process, None
            if process is not None:
                process.kill()
                process.wait()
                assert process.stdin is not None
                process.stdin.close()

    def _launch(self, member: _Member) -> None:
        if self._stopping:
            return
        line = member.line = self._hub.open_line(lambda: self._on_serving(member))
        config = FrontEndConfig(
            address=line.address,
            first_id=line.first_id,
            directory=str(self._hub.directory),
            listener=member.listener.fileno(),
            board=str(self._board),
            rows=len(self._members) + 1,
            row=member.row,
            tokenizer_path=str(self._tokenizer_path),
            http=self._limits,
            log_level=logging.getLevelName(logging.getLogger().level).lower(),
        )
        # Standard input stays open: its end tells the front end that we are gone.
        process = member.process = subprocess.Popen(  # noqa: S603 - our own command
            FRONT_END_COMMAND, stdin=subprocess.PIPE, pass_fds=(member.listener.fileno(),)
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()

        def wait_for_exit() -> None:
            process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: we are past `stop`
                self._loop.call_soon_threadsafe(self._on_exit, member, process)

        threading.Thread(target=wait_for_exit, name="front-end-exit", daemon=True).start()

    def _on_serving(self, member: _Member) -> None:
        member.serving = True
        member.backoff = _FIRST_BACKOFF_SECONDS
        if all(m.serving for m in self._members) and not self._serving.done():
            self._serving.set_result(None)

    def _on_exit(self, member: _Member, process: subprocess.Popen[bytes]) -> None:
        if process is not member.process or self._stopping:
            return
        assert member.line is not None
        assert process.stdin is not None
        self._hub.close_line(member.line)
        process.stdin.close()
        member.process = None
        member.serving = False
        if not self._serving.done():
            reason = f"a front end ended with code {process.returncode} while starting"
            self._serving.set_exception(FrontEndStartError(reason))
            return
        wait, member.backoff = member.backoff, min(2 * member.backoff, _LONGEST_BACKOFF_SECONDS)
        log.error(
            "a front end ended with code %s; starting it again in %.1f s", process.returncode, wait
        )
        self._loop.call_later(wait, self._relaunch, member)

    def _relaunch(self, member: _Member) -> None:
        try:
            self._launch(member)
        except OSError as error:
            log.error("a front end cannot be started: %s", error)
            assert member.line is not None
            self._hub.close_line(member.line)
            self._loop.call_later(_LONGEST_BACKOFF_SECONDS, self._relaunch, member)


async def run_fleet(
    hub: EngineHub,
    listeners: list[socket.socket],
    tokenizer_path: Path,
    limits: HTTPConfig,
    started: float,
) -> None:
    """Serve until a signal comes; a second interrupt no longer waits for requests in flight.

    Args:
        hub: of the engine process, which may be on its way.
        listeners: a socket for each front end.
        tokenizer_path: folder with the model's tokenizer.json.
        limits: of the service.
        started: when the command began, `time.perf_counter` seconds.

    Raises:
        EngineStartError: the engine cannot start.
        FrontEndStartError: a front end cannot.
    """
    loop = asyncio.get_running_loop()
    await hub.start()
    fleet = Fleet(hub, listeners, tokenizer_path, limits)
    stopped = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopped.is_set() and number == signal.SIGINT:
            fleet.kill()
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    stop = asyncio.ensure_future(stopped.wait())
    start = asyncio.ensure_future(_start(hub, fleet, listeners, started))
    try:
        await asyncio.wait({stop, start}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()  # raises where something cannot start
            await stop
    finally:
        stop.cancel()
        start.cancel()
        await asyncio.gather(stop, start, return_exceptions=True)
        await fleet.stop()
        await hub.stop()


async def _start(
    hub: EngineHub, fleet: Fleet, listeners: list[socket.socket], started: float
) -> None:
    """Start the front ends, and say when they listen and when the engine is ready."""
    fleet.start()
    serving = asyncio.ensure_future(fleet.wait_until_serving())
    ready = asyncio.ensure_future(hub.wait_until_ready())
    host, port = listeners[0].getsockname()[:2]
    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
        await serving
        log.info(
            "listening on http://%s:%d with %d front ends (503 until the model is loaded)",
            host, port, len(listeners),
        )  # fmt: skip
        await ready
        seconds = time.perf_counter() - started
        log.info("ready after %.1f s: POST http://%s:%d/generate", seconds, host, port)
    finally:
        for task in (serving, ready):
            task.cancel()
        await asyncio.gather(serving, ready, return_exceptions=True)
