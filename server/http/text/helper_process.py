"""A process that does one task at a time, and what its end says about the task.

A task may crash the process or keep it busy for hours; then that is a fact about the task. Other ends are not: somebody
kills or stops the process, or the system has no memory, no descriptors or no time for it. Only what the kernel itself
counts or what the process itself does is blamed on a task: its processor time, and the signals of a crash.

The process has a socket as its standard input and output. Frames have a length of 4 bytes in front. It reads one frame
with its configuration and answers with a `Report` once it is ready; then each task is answered with a `Report`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
from typing import TYPE_CHECKING, Final

import msgspec

from server.engine.link.spawn import interrupts_blocked, use_safe_path

if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTH: Final = struct.Struct("<I")

_LOOK_SECONDS: Final = 0.5
"""How often a process that computes is looked at."""
_SILENT_SECONDS: Final = 20.0
"""Time after which a process without an answer is given up: far more than its processor time, for busy machines."""
_EXIT_SECONDS: Final = 5.0
"""Time for a process that has closed its connection to end."""
_KILLED_SECONDS: Final = 1.0
"""Time for a killed process to end, where the caller has to wait."""
_REAP_SECONDS: Final = 0.05
_MOST_OF: Final = 0.5
"""Share of the processor time that the kernel must have counted. Its timer counts whole ticks, to whoever runs then."""
_CRASHES: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
)
TASK_FAILED: Final = 70
"""Exit code of a process that found an error of the program while it did a task (EX_SOFTWARE)."""


Running = dict["subprocess.Popen[bytes]", socket.socket]
"""Processes, and our ends of the connections to them."""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """An answer of the process.

    Attributes:
        seconds: processor time that it has used since its start.
        answer: encoded; empty in the first report.
    """

    seconds: float
    answer: msgspec.Raw = msgspec.Raw(b"null")


class LostError(Exception):
    """The process gave no answer, for a reason that says nothing about the task; the text says which."""


class ProcessorTimeError(Exception):
    """The task used up its processor time."""


class CrashError(Exception):
    """The task ended the process.

    Attributes:
        is_fresh: whether it was the first task of the process, so that no earlier one can be the reason.
    """

    def __init__(self, message: str, *, is_fresh: bool) -> None:
        super().__init__(message)
        self.is_fresh = is_fresh


class HelperProcess:
    """Owns one process. Used only on one event loop, by one caller at a time.

    A call that raises, or is cancelled, ends the process.

    Args:
        command: program and arguments.
        config: its first frame.
        seconds: processor time that the process allows itself for a task, after which SIGPROF ends it.
        running: gets the process and its connection while it runs, for `end_processes`.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: bytes,
        seconds: float,
        running: Running,
    ) -> None:
        self._command, self._config, self._seconds = command, config, seconds
        self._running = running
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._used = 0.0
        self._num_tasks = 0

    @property
    def pid(self) -> int | None:
        """Id of the process; None if it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether the process runs: it has neither ended nor been stopped, as far as can be told at once."""
        if self._connection is None or self._is_stopped():
            return False
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False  # it has closed the connection, or sent something that nobody asked for

    async def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            LostError: the system refuses, or the process ends or does not answer.
        """
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._process = _start(self._command, theirs)
                except BaseException:
                    ours.close()
                    raise
        except (OSError, MemoryError, subprocess.SubprocessError) as error:
            raise LostError(f"cannot be started: {error}") from error
        ours.setblocking(False)
        self._connection = self._running[self._process] = ours
        report = await self._exchange(self._config)
        if report is None:
            code, _ = await self._end()
            raise LostError(f"ended {_described(code)} while it started")
        self._used = report.seconds

    async def ask(self, task: bytes) -> msgspec.Raw:
        """Return the answer to a task.

        Raises:
            ProcessorTimeError: the task takes too much processor time.
            CrashError: the task ended the process.
            LostError: there is no answer for another reason.
        """
        is_fresh = self._num_tasks == 0
        self._num_tasks += 1
        report = await self._exchange(task)
        if report is not None:
            self._used = report.seconds
            return report.answer
        code, used = await self._end()
        # Anybody may send the signal; the kernel's count of the process's time is evidence.
        if code == -signal.SIGPROF and used - self._used >= _MOST_OF * self._seconds:
            raise ProcessorTimeError
        if code == TASK_FAILED or (code is not None and -code in _CRASHES):
            raise CrashError(f"ended {_described(code)}", is_fresh=is_fresh)
        raise LostError(f"ended {_described(code)}")

    def kill(self) -> None:
        """End the process at once, also if it is stopped. Calling it again does nothing."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            self._reap(process)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a killed process without blocking: the system may need a while to free its memory."""
        if process.poll() is not None:
            self._running.pop(process, None)
            return
        with contextlib.suppress(RuntimeError):  # without an event loop `end_processes` waits
            asyncio.get_running_loop().call_later(_REAP_SECONDS, self._reap, process)

    async def _exchange(self, data: bytes) -> Report | None:
        """Send a frame and return the next report; None if the process has closed the connection.

        Raises:
            LostError: the process was stopped, or does not answer.
        """
        exchange = asyncio.ensure_future(self._send_and_receive(data))
        try:
            seconds, num_stops = 0.0, 0
            while not (await asyncio.wait({exchange}, timeout=_LOOK_SECONDS))[0]:
                seconds += _LOOK_SECONDS
                # Twice in sequence, since a signal that continues all processes may just be on its way.
                num_stops = num_stops + 1 if self._is_stopped() else 0
                if num_stops > 1:
                    raise LostError("was stopped")
                if seconds >= _SILENT_SECONDS:
                    raise LostError(f"gave no answer for {seconds:g} s")
            return exchange.result()
        except BaseException:
            # The event loop must forget the descriptor before it is closed, and its number used again.
            exchange.cancel()
            with contextlib.suppress(BaseException):
                await exchange
            self.kill()
            raise

    async def _send_and_receive(self, data: bytes) -> Report | None:
        loop, connection = asyncio.get_running_loop(), self._connection
        assert connection is not None
        try:
            await loop.sock_sendall(connection, LENGTH.pack(len(data)) + data)
            (length,) = LENGTH.unpack(await _receive(connection, LENGTH.size))
            return msgspec.json.decode(await _receive(connection, length), type=Report)
        except (OSError, EOFError):
            return None
        except msgspec.DecodeError as error:
            raise LostError(f"sent something else than a report: {error}") from error

    async def _end(self) -> tuple[int | None, float]:
        """Wait for the end of the process, which has closed its connection.

        Returns:
            Its exit code, None if that cannot be told, and the processor time that it has used.
        """
        process, loop = self._process, asyncio.get_running_loop()
        assert process is not None
        until, pause = loop.time() + _EXIT_SECONDS, 0.001
        try:
            while loop.time() < until:
                found, status, usage = os.wait4(process.pid, os.WNOHANG)  # noqa: ASYNC222 - does not block
                if found:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    return process.returncode, usage.ru_utime + usage.ru_stime
                await asyncio.sleep(pause)
                pause = min(2 * pause, _REAP_SECONDS)
        except ChildProcessError:  # somebody else has waited for it
            process.returncode = 0
        finally:
            self.kill()
        return None, 0.0

    def _is_stopped(self) -> bool:
        if self._process is None or not hasattr(os, "waitid"):  # macOS has none
            return False
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        return False


def end_processes(running: Running) -> None:
    """Kill processes and wait for them; one that cannot be killed is left after a moment."""
    for process in running:
        process.kill()
    while running:
        process, connection = running.popitem()
        connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_SECONDS)


def _start(command: Sequence[str], connection: socket.socket) -> subprocess.Popen[bytes]:
    use_safe_path()
    number = connection.fileno()
    with interrupts_blocked():
        return subprocess.Popen(command, stdin=number, stdout=number)  # noqa: S603 - our own command


async def _receive(connection: socket.socket, count: int) -> bytearray:
    """Return that many bytes.

    Raises:
        EOFError: the connection has been closed.
    """
    loop, data = asyncio.get_running_loop(), bytearray(count)
    view = memoryview(data)
    while view:
        size = await loop.sock_recv_into(connection, view)
        if not size:
            raise EOFError
        view = view[size:]
    return data


def _described(code: int | None) -> str:
    if code is None:
        return "with an unknown code"
    if code >= 0:
        return f"with code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
