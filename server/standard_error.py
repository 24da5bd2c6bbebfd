"""Standard error of the service's processes, to which writing never waits, whoever reads it or does not.

A pipe that nobody reads, a terminal that is stopped or a disk that does not answer would otherwise stop the thread that
logs, which is the event loop. Lines that cannot be written yet wait in a queue of limited size; what has no place in it
is dropped and counted.

Has almost no imports: `tessera serve` calls `never_wait` before anything else.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import io
import os
import select
import socket
import stat
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STANDARD_ERROR: Final = 2
_MAX_LINES: Final = 10_000
_MAX_BYTES: Final = 4 << 20
_ATOMIC_BYTES: Final = select.PIPE_BUF
"""Of several processes that write to a pipe, none comes between the bytes of such a write."""
_FILE_BYTES: Final = 1 << 16
_POLL_MS: Final = 1000
_EXIT_SECONDS: Final = 1.0


def _plain_notice(lines: int) -> str:
    return f"{lines} lines of the log were dropped\n"


class StandardError(io.TextIOBase):
    """A text stream to a file descriptor. `write` never waits; any thread may call it.

    A pipe, a terminal or a socket is written to at once as long as it takes the bytes. Otherwise, and for a file, a
    thread writes, in the same order. After lines were dropped, a line that says how many precedes the next one.

    Attributes:
        dropped: lines that were not written, because there were too many or the system refused them.
        notice: renders the line about a number of dropped lines; it ends with a line break.

    Args:
        fd: the descriptor. That of a pipe or a terminal is replaced by one that does not block, which leaves the
            descriptors of other processes as they are.
        max_lines: lines that may wait.
        max_bytes: their bytes.
    """

    def __init__(self, fd: int, max_lines: int = _MAX_LINES, max_bytes: int = _MAX_BYTES) -> None:
        super().__init__()
        self.dropped = 0
        self.notice: Callable[[int], str] = _plain_notice
        self._fd = fd
        self._max_lines, self._max_bytes = max_lines, max_bytes
        self._write_now = _immediate_writer(fd)
        self._most_bytes = _FILE_BYTES if self._write_now is None else _ATOMIC_BYTES
        self._counter: tuple[memoryview[float], int] | None = None
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        # Each with the number of its lines, and of the dropped lines that it reports.
        self._queue: collections.deque[tuple[bytes, int, int]] = collections.deque()
        self._num_lines = self._num_bytes = 0
        self._is_full = False
        self._line = ""
        self._unreported = 0
        self._begun = False  # whether a part of the first one in the queue was written
        self._is_torn = False  # whether the last line that was written has no end
        self._fails = False  # whether the system refused what was last written
        self._thread: threading.Thread | None = None

    def forget_queue(self) -> None:
        """Begin anew, in a forked process: what waits is its parent's, whose thread it does not have."""
        self._reset()

    @property
    def encoding(self) -> str:  # type: ignore[override] # a writable attribute of the base class
        """What text is encoded in."""
        return "utf-8"

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Do nothing: the stream is open as long as the process lives."""

    def write(self, text: str) -> int:
        """Write the complete lines of the text so far; the rest waits for its end, or for `flush`."""
        with self._changed:
            end = text.rfind("\n") + 1
            if end or len(self._line) + len(text) > self._most_bytes:
                end = end or len(text)
                self._put(self._line + text[:end])
                self._line = text[end:]
            else:
                self._line += text
        return len(text)

    def flush(self) -> None:
        """Write what has no line break yet, as progress bars and questions have."""
        with self._changed:
            if self._line:
                line, self._line = self._line, ""
                self._put(line)

    def drain(self, seconds: float) -> bool:
        """Wait until all is written, `seconds` at most; return whether it is."""
        ending = time.monotonic() + seconds
        with self._changed:
            self.flush()
            while self._queue and (left := ending - time.monotonic()) > 0:
                self._start_thread()
                self._changed.wait(left)
            return not self._queue

    def count_dropped_in(self, row: memoryview[float], cell: int) -> None:
        """Add the number of dropped lines to a number that others read, now and at each change."""
        with self._changed:
            if self._counter is None:
                row[cell] += self.dropped
            self._counter = row, cell

    def _put(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        lines = data.count(b"\n") or 1
        if (
            self._is_full
            and 2 * max(self._num_lines / self._max_lines, self._num_bytes / self._max_bytes) <= 1
        ):
            self._is_full = False
        if (
            self._num_lines + lines > self._max_lines
            or self._num_bytes + len(data) > self._max_bytes
        ):
            self._is_full = True
        if self._is_full:
            self._count_dropped(lines)
        else:
            self._report_dropped()
            for piece in _pieces(data, self._most_bytes):
                self._append(piece, piece.count(b"\n"), 0)
        if self._write_now is not None:
            self._write_queue(self._write_now)
        if self._queue:
            self._start_thread()

    def _append(self, data: bytes, lines: int, reports: int) -> None:
        self._queue.append((data, lines, reports))
        self._num_lines += lines
        self._num_bytes += len(data)

    def _report_dropped(self) -> None:
        if self._unreported:
            reports, self._unreported = self._unreported, 0
            self._append(self.notice(reports).encode("utf-8", "backslashreplace"), 0, reports)

    def _count_dropped(self, lines: int) -> None:
        self.dropped += lines
        self._unreported += lines
        if self._counter is not None:
            row, cell = self._counter
            row[cell] += lines

    def _write_queue(self, write: Callable[[bytes], int]) -> None:
        """Write what can be written without waiting."""
        while self._queue:
            data = self._next()
            try:
                count = write(data)
            except BlockingIOError:
                return
            except OSError:
                self._drop_next()
            else:
                self._note_written(count)

    def _next(self) -> bytes:
        """Return what is to be written next."""
        data, lines, reports = self._queue[0]
        if self._is_torn and not data.startswith(b"\n"):
            self._queue[0] = b"\n" + data, lines, reports
            self._num_bytes += 1
        return self._queue[0][0]

    def _note_written(self, count: int) -> None:
        data, lines, reports = self._queue[0]
        self._fails = self._is_torn = False
        self._num_bytes -= count
        if count < len(data):
            self._queue[0] = data[count:], lines, reports
            self._begun = True
        else:
            self._queue.popleft()
            self._num_lines -= lines
            self._begun = False

    def _drop_next(self) -> None:
        """Drop what the system refuses: its reader has gone, or the disk is full, which may pass."""
        data, lines, reports = self._queue.popleft()
        self._num_lines -= lines
        self._num_bytes -= len(data)
        self._fails = True
        self._is_torn, self._begun = self._is_torn or self._begun, False
        self._unreported += reports
        if lines or not reports:
            self._count_dropped(lines or 1)

    def _start_thread(self) -> None:
        """Start the thread that waits, or wake it up; if there can be no thread now, the next line tries again."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="standard-error", daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    if not self._fails:
                        self._report_dropped()
                    self._changed.notify_all()  # those who wait in `drain`
                    while not self._queue:
                        self._changed.wait()
                if self._write_now is not None:
                    self._write_queue(self._write_now)
                    if not self._queue:
                        continue
                data = self._next()
            if self._write_now is not None:
                self._wait_until_writable()
            else:
                self._write_and_wait(data)

    def _wait_until_writable(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        poll.poll(_POLL_MS)

    def _write_and_wait(self, data: bytes) -> None:
        count = -1
        with contextlib.suppress(OSError):
            count = os.write(self._fd, data)
        with self._changed:
            if count < 0:
                self._drop_next()
            else:
                self._note_written(count)


def never_wait() -> None:
    """Make this process's standard error a `StandardError`; does nothing if it is one.

    This includes what libraries in C write to the descriptor, and dumps of stacks. At exit, lines that wait have a
    second.
    """
    if isinstance(sys.stderr, StandardError):
        return
    stream = StandardError(_STANDARD_ERROR)
    sys.stderr = stream
    atexit.register(stream.drain, _EXIT_SECONDS)
    os.register_at_fork(after_in_child=stream.forget_queue)


def drain(seconds: float = _EXIT_SECONDS) -> None:
    """Wait for the lines that wait, `seconds` at most, before this process ends without its exit handlers."""
    if isinstance(sys.stderr, StandardError):
        sys.stderr.drain(seconds)


def count_dropped_lines_in(row: memoryview[float], cell: int) -> None:
    """Add the number of lines that this process drops to a number that others read."""
    if isinstance(sys.stderr, StandardError):
        sys.stderr.count_dropped_in(row, cell)


def num_dropped_lines() -> int:
    """Return how many lines of the log this process has dropped."""
    return sys.stderr.dropped if isinstance(sys.stderr, StandardError) else 0


def _immediate_writer(fd: int) -> Callable[[bytes], int] | None:
    """Return a function that writes to a descriptor without waiting; None if there is none, as for files."""
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            connection = socket.socket(fileno=os.dup(fd))
            return lambda data: connection.send(data, socket.MSG_DONTWAIT)
        if stat.S_ISFIFO(mode) or os.isatty(fd):
            # The flag belongs to what was opened, which other processes share: opened again, it is this process's own.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            again = os.open(f"/proc/self/fd/{fd}", flags)
            os.dup2(again, fd)
            os.close(again)
        elif not stat.S_ISCHR(mode):
            return None
    except OSError:
        return None
    return functools.partial(os.write, fd)


def _pieces(data: bytes, most: int) -> Iterator[bytes]:
    """Split text after line breaks into parts of at most `most` bytes; a longer line is split too."""
    start = 0
    while len(data) - start > most:
        end = data.rfind(b"\n", start, start + most) + 1 or start + most
        yield data[start:end]
        start = end
    yield data[start:] if start else data
