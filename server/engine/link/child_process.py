"""Supervises a child process: starts it, detects its exit and restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Final

from server.engine.link.spawn import KILLED_SECONDS, end, kill, spawn

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping, Sequence

    from server.engine.link.spawn import LinkedProcess

log = logging.getLogger("tessera")

# Delay before a restart. It doubles with each restart, so that a process that keeps crashing does not use up a core.
_MIN_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 30.0
MOST_FAILURES: Final = 8
"""Ends and refused launches in sequence, without a success in between, after which a process counts as hopeless: half a
minute of delays, and the time that the attempts take."""
_POLL_SECONDS = 0.1


class ChildStartError(Exception):
    """A child process cannot start; the text says why.

    Example:
        >>> async def main() -> None:
        ...     try:
        ...         async with embedded_service(Settings(device="cpu"), engine_command=["/no/program"]) as service:
        ...             await service.wait_until_ready()
        ...     except ChildStartError as error:
        ...         print("/no/program" in str(error))
        >>> asyncio.run(main())
        True
    """


class ChildProcess:
    """Owns a child process and its replacements; at most one of them runs at a time.

    `launch` needs no event loop; `start` supervises the process from the running one. Not thread-safe.

    Attributes:
        process: the running process; None before `launch`, while a restart is pending, and after `stop` or `kill`.
        num_failures: ends and refused launches in sequence, until `report_success`.

    Args:
        name: for errors and log lines, "engine process" for example.
        command: program and arguments.
        configure: called at each launch with the new process. Acquires what the process needs, takes over its link
            if it uses that, and returns its configuration, one line of JSON. An `OSError` cancels the launch.
        on_exit: called with the exit code of a process that ended by itself or was killed from outside. Releases what
            `configure` acquired and returns whether to restart.
        on_failure: called with the reason, after each failure that a restart follows.
        pass_fds: file descriptors that the process inherits.
        environment: variables of the process that differ from those of this one; not those of `spawned`.
        spawned: a process that was spawned earlier, for the first launch.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        configure: Callable[[LinkedProcess], bytes],
        on_exit: Callable[[int], bool],
        *,
        on_failure: Callable[[str], None] = lambda _: None,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        spawned: LinkedProcess | None = None,
    ) -> None:
        self.process: LinkedProcess | None = None
        self._name = name
        self._command = command
        self._configure = configure
        self._on_exit = on_exit
        self._on_failure = on_failure
        self.num_failures = 0
        self._pass_fds = pass_fds
        self._environment = environment or {}
        self._spawned = spawned
        self._backoff = _MIN_BACKOFF_SECONDS
        self._restart: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None

    def launch(self) -> None:
        """Start a process and send it its configuration.

        Raises:
            ChildStartError: the operating system refuses the process or what it needs.
        """
        try:
            process, self._spawned = self._spawned or self._spawn(), None
            try:
                line = self._configure(process)
                # On a thread: a process that was stopped does not read, and a pipe's buffer may be too small.
                arguments, name = (process, line), f"{self._name} configuration"
                threading.Thread(target=_send_line, args=arguments, name=name, daemon=True).start()
            except (OSError, RuntimeError):
                end(process)
                raise
        except (OSError, RuntimeError) as error:  # the second: there can be no thread
            raise ChildStartError(f"the {self._name} cannot be started: {error}") from error
        self.process = process
        if self._loop is not None:
            self._watch(process, self._loop)

    def _spawn(self) -> LinkedProcess:
        return spawn(self._command, self._pass_fds, self._environment)

    def start(self) -> None:
        """Supervise the process from the running event loop; launch it first unless it was launched earlier.

        Raises:
            ChildStartError: see `launch`.
        """
        if self.process is None:
            self.launch()
        assert self.process is not None
        self._loop = asyncio.get_running_loop()
        self._watch(self.process, self._loop)

    @property
    def is_hopeless(self) -> bool:
        """Whether another restart is unlikely to succeed."""
        return self.num_failures > MOST_FAILURES

    def report_success(self) -> None:
        """Restart without a long delay next time, because the process has started successfully."""
        self._backoff = _MIN_BACKOFF_SECONDS
        self.num_failures = 0

    async def stop(self, seconds: float, number: signal.Signals | None = None) -> None:
        """Wait for the process to end, then kill it; there is no restart. A process that cannot be killed is left.

        Args:
            seconds: to wait before it is killed.
            number: signal that asks the process to end; None if it has been asked in another way.
        """
        try:
            if self.process is not None:
                if number is not None:
                    self.process.send_signal(number)
                loop = asyncio.get_running_loop()
                self._ended = loop.create_future()
                timeout = loop.call_later(seconds, kill, self.process)
                await asyncio.wait({self._ended}, timeout=seconds + KILLED_SECONDS)
                timeout.cancel()
                if not self._ended.done():
                    log.critical("the %s %d cannot be killed", self._name, self.process.pid)
                    self.process.link.close()
                    self.process = None
        finally:
            self.kill()

    def kill_after(self, seconds: float) -> None:
        """Kill the process if it still runs after a time; `on_exit` is called, which decides about a restart."""
        process = self.process
        if process is None:
            return
        if seconds and self._loop is not None:
            self._loop.call_later(seconds, self._kill_if_current, process)
        else:
            kill(process)

    def _kill_if_current(self, process: LinkedProcess) -> None:
        if process is self.process:
            kill(process)

    def kill(self) -> None:
        """End the process at once, without `on_exit` and without a restart. Calling it again does nothing."""
        if self._restart is not None:
            self._restart.cancel()
        process, self.process = self.process, None
        if process is not None:
            end(process)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _watch(self, process: LinkedProcess, loop: asyncio.AbstractEventLoop) -> None:
        def wait_for_exit() -> None:
            process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._handle_exit, process)

        try:
            threading.Thread(target=wait_for_exit, name=f"{self._name} exit", daemon=True).start()
        except RuntimeError:  # the system refuses the thread
            self._poll(process, loop)

    def _poll(self, process: LinkedProcess, loop: asyncio.AbstractEventLoop) -> None:
        """Look every now and then whether a process has ended."""
        if process.poll() is None:
            loop.call_later(_POLL_SECONDS, self._poll, process, loop)
        else:
            self._handle_exit(process)

    def _handle_exit(self, process: LinkedProcess) -> None:
        if process is not self.process:  # `kill` ended it
            return
        if self._ended is not None:
            self.kill()
            return
        self.process = None
        end(process)
        if self._on_exit(process.returncode):
            reason = f"the {self._name} ended with code {process.returncode}"
            self._restart_later(reason, "restarting it")

    def _restart_later(self, reason: str, action: str) -> None:
        assert self._loop is not None
        seconds, self._backoff = self._backoff, min(2 * self._backoff, _MAX_BACKOFF_SECONDS)
        self.num_failures += 1
        log.error("%s; %s in %.1f s", reason, action, seconds)
        self._restart = self._loop.call_later(seconds, self._relaunch)
        self._on_failure(reason)

    def _relaunch(self) -> None:
        try:
            self.launch()
        except ChildStartError as error:
            self._restart_later(str(error), "trying again")


def _send_line(process: LinkedProcess, line: bytes) -> None:
    """Write a line to the standard input of a process that may have ended already, which its exit code explains."""
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # closed at one of its ends
        process.stdin.write(line + b"\n")
        process.stdin.flush()
