"""A process that does one task at a time, and what its end says about the task.

A task may crash the process or keep it busy for hours; then that is a fact about the task. Other ends are not: somebody
kills or stops the process, or the system has no memory, no descriptors or no time for it. Only what the kernel itself
counts or what the process itself does is blamed on a task: its processor time, and the signals of a crash.

The process has a socket as its standard input and output (`model.helper_process.child` is the other side). A message to
it is a `TASK`, a reply a `REPLY`, each followed by as many bytes as it says. The reply to the first message, the
configuration, says that the process is ready. It ends when the socket is closed, and so with its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from model.helper_process.steps import Wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.helper_process.steps import Steps

TASK: Final = struct.Struct("<Id")
"""Number of bytes that follow, and the processor time that they may take in seconds; 0 for no limit."""
REPLY: Final = struct.Struct("<Idd")
"""Number of bytes that follow, and processor time in seconds: of the task, and of the process since its start."""
TASK_FAILED: Final = 70
"""Exit code of a process that found an error of the program while it did a task (EX_SOFTWARE)."""
MOST_REPLY_BYTES: Final = 256 << 20

_FIRST_BYTES: Final = 1 << 16
_LOOK_SECONDS: Final = 0.5
"""How often a process that computes is looked at."""
_SILENT_SECONDS: Final = 20.0
_SILENT_FACTOR: Final = 10.0
"""A process without an answer is given up after these seconds and so many times its processor time."""
_EXIT_SECONDS: Final = 5.0
"""Time for a process that has closed its connection to end."""
_KILLED_SECONDS: Final = 1.0
"""Time for a killed process to end, where the caller has to wait."""
_MOST_PAUSE: Final = 0.05
_MOST_OF: Final = 0.5
"""Share of the processor time that the kernel must have counted. Its timer counts whole ticks, to whoever runs then."""
_MOST_WORDS: Final = 4096
_CRASHES: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
)
# Without these, some interpreters do not start. No other variable is handed on: a process that reads what a stranger
# has written has no secrets.
_HANDED_ON: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")
_VARIABLES: Final = {
    "PYTHONSAFEPATH": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
}


class Reply(NamedTuple):
    """The reply to a task.

    Attributes:
        content: as the program encodes it.
        seconds: processor time of the task.
    """

    content: bytes
    seconds: float


class LostError(Exception):
    """The process gave no answer, for a reason that says nothing about the task; the text says which."""


class ProcessorTimeError(Exception):
    """The task used up its processor time."""


class CrashError(Exception):
    """The task ended the process; the text says how."""


class HelperProcess:
    """Owns one process. Used by one caller at a time, which waits in a thread or on an event loop.

    A call that raises, or is closed, ends the process.

    Args:
        command: program and arguments.
        config: its first message.

    Attributes:
        notes: of whoever uses it; empty at first.
    """

    def __init__(self, command: Sequence[str], config: bytes = b"") -> None:
        self._command, self._config = command, config
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._words: int | None = None
        self._used = 0.0
        self._is_interrupted = False
        self.notes: set[str] = set()

    @property
    def pid(self) -> int | None:
        """Id of the process; None if it does not run."""
        process = self._process
        return None if process is None else process.pid

    @property
    def is_usable(self) -> bool:
        """Whether the process runs: it has neither ended nor been stopped, as far as can be told at once.

        After a fork it is the parent's.
        """
        if self._connection is None or self._owner != os.getpid() or self._is_stopped():
            return False
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False  # it has closed the connection, or sent something that nobody asked for

    def start(self) -> Steps[None]:
        """Start the process and wait until it is ready.

        Raises:
            LostError: the system refuses, or the process ends or does not answer.
        """
        try:
            self._start()
        except (OSError, MemoryError, subprocess.SubprocessError) as error:
            raise LostError(f"cannot be started: {error}") from error
        try:
            yield from self._exchange(self._config, 0.0)
        except CrashError as error:
            raise LostError(str(error)) from None

    def ask(self, task: bytes, seconds: float) -> Steps[Reply]:
        """Return the reply to a task.

        Args:
            task: less than 4 GiB.
            seconds: processor time that it may take.

        Raises:
            ProcessorTimeError: the task takes too much processor time.
            CrashError: the task ended the process.
            LostError: there is no answer for another reason.
        """
        return (yield from self._exchange(task, seconds))

    def interrupt(self) -> None:
        """End the process, while another thread or task may wait for its answer: that one finds it ended."""
        self._is_interrupted = True
        process = self._process
        if process is not None and self._owner == os.getpid():
            process.kill()

    def close(self) -> None:
        """End the process at once, also if it is stopped, and do not wait. Calling it again does nothing."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        words, self._words = self._words, None
        if connection is not None:
            connection.close()
        if words is not None:
            os.close(words)
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        if process.poll() is None:
            # The system may need a while to free its memory.
            with contextlib.suppress(
                RuntimeError
            ):  # no thread: the process stays a zombie until the next one starts
                threading.Thread(target=process.wait, name="reap", daemon=True).start()

    def wait_for_end(self) -> None:
        """Close it and wait for its end; one that cannot be killed is left after a moment."""
        process = self._process
        self.close()
        if process is not None and self._owner == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_SECONDS)

    def _start(self) -> None:
        with contextlib.ExitStack() as ours:
            connection, theirs = socket.socketpair()
            ours.callback(connection.close)
            with theirs:
                self._words, their_words = os.pipe()
                ours.callback(self._close_words)
                try:
                    os.set_blocking(their_words, False)  # nobody reads it until the process ends
                    os.set_blocking(self._words, False)
                    number = theirs.fileno()
                    # In a session of its own, since an interrupt often goes to the whole process group.
                    self._process = subprocess.Popen(  # noqa: S603 - our own command
                        self._command, stdin=number, stdout=number, stderr=their_words, env=_environment(),
                        start_new_session=True,
                    )  # fmt: skip
                finally:
                    os.close(their_words)
            ours.pop_all()
        connection.setblocking(False)
        self._connection = connection
        if self._is_interrupted:
            self._process.kill()

    def _close_words(self) -> None:
        words, self._words = self._words, None
        if words is not None:
            os.close(words)

    def _exchange(self, task: bytes, seconds: float) -> Steps[Reply]:
        """Send a message and return the reply; see `ask`."""
        try:
            until = time.monotonic() + _SILENT_SECONDS + _SILENT_FACTOR * seconds
            header = TASK.pack(len(task), seconds)
            with contextlib.suppress(OSError, EOFError):
                yield from self._send(header + task, until)
                return (yield from self._receive(until))
            code, used = yield from self._end()
            how = f"ended {_described(code)}" + ("" if self._used else " while it started")
            how += self._last_words()
            # Anybody may send the signal; the kernel's count of the process's time is evidence.
            if code == -signal.SIGPROF and used - self._used >= _MOST_OF * seconds > 0:
                raise ProcessorTimeError
            if code == TASK_FAILED or (code is not None and -code in _CRASHES):
                raise CrashError(how)
            raise LostError(how)
        except BaseException:
            self.close()
            raise

    def _send(self, data: bytes, until: float) -> Steps[None]:
        assert self._connection is not None
        view = memoryview(data)
        while True:
            with contextlib.suppress(BlockingIOError):
                view = view[self._connection.send(view) :]
            if not view:
                return
            yield from self._wait(until, is_write=True)

    def _receive(self, until: float) -> Steps[Reply]:
        """Return the next reply. Nothing follows it, so what is there may be read at once."""
        assert self._connection is not None
        received = b""
        while len(received) < REPLY.size:
            yield from self._wait(until)
            with contextlib.suppress(BlockingIOError):
                received += self._take(_FIRST_BYTES)
        size, seconds, used = REPLY.unpack_from(received)
        if size > MOST_REPLY_BYTES or len(received) > REPLY.size + size:
            raise LostError("sent something else than a reply")
        content, done = received[REPLY.size :], len(received) - REPLY.size
        if done < size:
            whole = bytearray(content).ljust(size)
            view = memoryview(whole)
            while done < size:
                yield from self._wait(until)
                with contextlib.suppress(BlockingIOError):
                    count = self._connection.recv_into(view[done:])
                    if not count:
                        raise EOFError
                    done += count
            content = bytes(whole)
        self._used = max(used, 1e-9)
        return Reply(content, seconds)

    def _take(self, count: int) -> bytes:
        assert self._connection is not None
        data = self._connection.recv(count)
        if not data:
            raise EOFError
        return data

    def _wait(self, until: float, *, is_write: bool = False) -> Steps[None]:
        """Wait for the connection.

        Raises:
            LostError: the process was stopped, or does not answer.
        """
        assert self._connection is not None
        num_stops, wait = 0, Wait(_LOOK_SECONDS, self._connection.fileno(), is_write)
        while not (yield wait):
            # Twice in sequence, since a signal that continues all processes may just be on its way.
            num_stops = num_stops + 1 if self._is_stopped() else 0
            if num_stops > 1:
                raise LostError("was stopped")
            if time.monotonic() >= until:
                raise LostError("gave no answer in time")

    def _end(self) -> Steps[tuple[int | None, float]]:
        """Wait for the end of the process, which has closed its connection.

        Returns:
            Its exit code, None if that cannot be told, and the processor time that it has used.
        """
        process = self._process
        assert process is not None
        until, pause = time.monotonic() + _EXIT_SECONDS, 0.001
        try:
            while time.monotonic() < until:
                found, status, usage = os.wait4(process.pid, os.WNOHANG)
                if found:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    return process.returncode, usage.ru_utime + usage.ru_stime
                yield Wait(pause)
                pause = min(2 * pause, _MOST_PAUSE)
        except ChildProcessError:  # somebody else has waited for it
            process.returncode = 0
        return None, 0.0

    def _last_words(self) -> str:
        """Return the last line that the process wrote to standard error, as the end of a message."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            assert self._words is not None
            while part := os.read(self._words, _MOST_WORDS):
                lines = part.decode("utf-8", "replace").strip().splitlines() or lines
        return f": {lines[-1]}" if lines else ""

    def _is_stopped(self) -> bool:
        if self._process is None or not hasattr(os, "waitid"):  # macOS has none
            return False
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        return False


def _environment() -> dict[str, str]:
    handed_on = os.environ  # noqa: TID251 - handed on, not read
    environment = {name: handed_on[name] for name in _HANDED_ON if name in handed_on}
    return environment | _VARIABLES | {"PYTHONPATH": os.pathsep.join(_module_path())}


def _module_path() -> list[str]:
    """Return where this process finds modules, without the working directory."""
    ours = str(Path(__file__).resolve().parents[__name__.count(".")])
    others = {"", str(Path.cwd())} - {ours}
    return list(dict.fromkeys([*(path for path in sys.path if path not in others), ours]))


def _described(code: int | None) -> str:
    if code is None:
        return "with an unknown code"
    if code >= 0:
        return f"with code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
