"""A child process that answers one task after the other, and may be killed at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HEADER: Final = struct.Struct("!I")
"""The number of bytes that follow, of a task and of a reply."""

_FIRST_BYTES: Final = 1 << 16
_MOST_ERROR_BYTES: Final = 4096


class HelperEndedError(Exception):
    """The process ended before it answered.

    Attributes:
        code: its exit status; -N if signal N ended it.
        last_words: the end of what it wrote to standard error.
    """

    def __init__(self, code: int, last_words: str = "") -> None:
        self.code, self.last_words = code, last_words
        super().__init__(
            f"it ended with {describe_code(code)}" + (last_words and f": {last_words}")
        )


class HelperTimeoutError(Exception):
    """The process did not answer in time, and was killed."""


def describe_code(code: int) -> str:
    """Return the name of an exit status: `status 1` or `SIGKILL`."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"status {code}"


class HelperProcess:
    """Owns a process whose standard input and output are one socket. Only `kill` may be called by a second thread.

    The process ends when the socket is closed, and so with this one.

    Args:
        command: program and arguments.
        environment: all its variables.
        most_reply_bytes: limit of a reply.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], most_reply_bytes: int
    ) -> None:
        self._most_reply_bytes = most_reply_bytes
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(self._socket.close)
            # In a session of its own, since an interrupt often goes to the whole process group.
            self._process = subprocess.Popen(  # noqa: S603 - the caller's command
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE, env=dict(environment),
                start_new_session=True,
            )  # fmt: skip
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and is a child of this process: after a fork the socket is the parent's."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, task: bytes, seconds: float) -> bytes:
        """Send a task and return the reply.

        Args:
            task: less than 4 GiB.
            seconds: wall-clock time after which the process is killed.

        Raises:
            HelperEndedError: the process ended, or its reply is longer than the limit.
            HelperTimeoutError: it did not answer in time.
        """
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(HEADER.pack(len(task)) + task)
            return self._receive(time.monotonic() + seconds)
        except TimeoutError:
            self.kill()
            raise HelperTimeoutError(f"it did not answer within {seconds:g} seconds") from None
        except (OSError, EOFError):
            raise self._ended() from None
        except BaseException:  # its reply would be taken for that of the next task
            self.kill()
            raise

    def kill(self) -> None:
        """End the process, and wait for its end. A call of `ask` in another thread raises `HelperEndedError`."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a reply
        with self._lock:
            self._socket.close()
            assert self._process.stderr is not None
            self._process.stderr.close()

    def _receive(self, deadline: float) -> bytes:
        """Return the next reply. Nothing follows it, so what is there may be read at once."""
        received = self._socket.recv(_FIRST_BYTES)
        while 0 < len(received) < HEADER.size:
            received += self._socket.recv(_FIRST_BYTES)
        if not received:
            raise EOFError
        (size,) = HEADER.unpack_from(received)
        if size > self._most_reply_bytes:
            raise EOFError
        if len(received) == HEADER.size + size:
            return received[HEADER.size :]
        reply = bytearray(received[HEADER.size :]).ljust(size)
        view, done = memoryview(reply), len(received) - HEADER.size
        while done < size:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            count = self._socket.recv_into(view[done:])
            if not count:
                raise EOFError
            done += count
        return bytes(reply)

    def _ended(self) -> HelperEndedError:
        """Return the error of a process that has closed its socket."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # a moment between its last byte and its end
        code, words = self._process.poll(), ""
        with self._lock:
            assert self._process.stderr is not None
            if code is not None and not self._process.stderr.closed:
                words = self._process.stderr.read(_MOST_ERROR_BYTES).decode("utf-8", "replace")
        self.kill()
        lines = words.strip().splitlines()
        return HelperEndedError(self._process.returncode, lines[-1] if lines else "")
