"""Processes of one program that take turns, and further attempts at a task whose process ends without a verdict."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

from model.helper_process.process import CrashError, HelperProcess, LostError
from model.helper_process.steps import Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from model.helper_process.steps import Steps

ResultT = TypeVar("ResultT")

log = logging.getLogger("tessera")

_CRASHES: Final = 2
"""New processes that a task ends before that is its fault."""


class HelperPool:
    """Owns processes of one program, which start when they are needed. Thread-safe.

    Args:
        name: of a process, for messages.
        most: how many run at most; None where the callers see to it.
        most_idle: how many are kept when they have nothing to do.
        busy_seconds: how long a task waits for a process before another one is started.
        pauses: seconds before each further attempt: what the system lacks for a process may be there a moment later.
    """

    def __init__(
        self,
        name: str,
        *,
        most: int | None = None,
        most_idle: int | None = None,
        busy_seconds: float = 0.0,
        pauses: Sequence[float] = (0.0, 0.0),
    ) -> None:
        self._name, self._pauses = name, pauses
        self._most, self._most_idle, self.busy_seconds = most, most_idle, busy_seconds
        self._lock = threading.Lock()
        self._idle: list[HelperProcess] = []
        self._all: set[HelperProcess] = set()
        self._waiting: deque[concurrent.futures.Future[None]] = deque()
        self._num_ends = 0
        weakref.finalize(self, _end_processes, self._all)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run."""
        with self._lock:
            return [pid for process in self._all if (pid := process.pid) is not None]

    @property
    def num_busy(self) -> int:
        """How many processes do a task, or start."""
        with self._lock:
            return len(self._all) - len(self._idle)

    def run(
        self,
        make: Callable[[], HelperProcess],
        work: Callable[[HelperProcess, bool], Steps[ResultT]],
    ) -> Steps[ResultT]:
        """Return what a function finds with a process; another process gets the work if one ends without a verdict.

        Args:
            make: makes a process, which the pool starts.
            work: gets the process, and whether it is new.

        Raises:
            CrashError: the work ends new processes.
            LostError: the processes fail, for reasons that say nothing about the work, or `end` was called.
            Exception: what `work` raises.
        """
        num_crashes, num_ends, is_new, problem = 0, self._num_ends, False, ""
        for pause in (*self._pauses, None):
            try:
                with contextlib.ExitStack() as lent:
                    process, is_new = yield from self._take(lent, make, new=num_crashes > 0)
                    if is_new:
                        yield from process.start()
                    return (yield from work(process, is_new))
            except CrashError as error:
                log.warning("%s %s", self._name, error)
                num_crashes += is_new
                if num_crashes == _CRASHES:
                    raise
                problem = str(error)
            except LostError as error:
                log.warning("%s %s", self._name, error)
                problem = str(error)
            if self._num_ends != num_ends:
                break
            if pause:
                yield Wait(pause)
        raise LostError(problem)

    def end(self) -> None:
        """End all processes. What they do fails; a later task starts a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._all.difference_update(idle)
            busy = list(self._all)
            self._num_ends += 1
        for process in busy:
            process.interrupt()  # whoever uses it closes it
        for process in idle:
            process.close()

    def _take(
        self, lent: contextlib.ExitStack, make: Callable[[], HelperProcess], *, new: bool
    ) -> Steps[tuple[HelperProcess, bool]]:
        until = time.monotonic() + self.busy_seconds
        while True:
            with self._lock:
                process = None if new else self._find_idle()
                is_new = process is None
                is_full = self._most is not None and len(self._all) >= self._most
                if process is None and new and is_full and self._idle:
                    self._discard(self._idle.pop())
                    is_full = False
                left = until - time.monotonic() if self._all and not new else 0.0
                if process is None and not is_full and left <= 0:
                    process = make()
                    self._all.add(process)
                place: concurrent.futures.Future[None] = concurrent.futures.Future()
                if process is None:
                    self._waiting.append(place)
            if process is not None:
                lent.callback(self._give_back, process)
                return process, is_new
            with self._waits(place):
                yield Wait(None if is_full else left, future=place)

    @contextlib.contextmanager
    def _waits(self, place: concurrent.futures.Future[None]) -> Iterator[None]:
        """Leave the queue; one that is called and does not come calls the next one."""
        try:
            yield
        except BaseException:
            with self._lock:
                if place.done():
                    self._call_next()
            raise
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(place)

    def _find_idle(self) -> HelperProcess | None:
        """Return the process that was used last, of those that wait; the lock is held."""
        while self._idle:
            process = self._idle.pop()
            if process.is_usable:
                return process
            self._discard(process)
        return None

    def _discard(self, process: HelperProcess) -> None:
        self._all.discard(process)
        process.close()

    def _give_back(self, process: HelperProcess) -> None:
        with self._lock:
            is_kept = self._most_idle is None or len(self._idle) < self._most_idle
            if (
                process in self._all and is_kept and process.pid is not None
            ):  # it is looked at when it is taken
                self._idle.append(process)
            else:
                self._discard(process)
            self._call_next()

    def _call_next(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)


def _end_processes(processes: set[HelperProcess]) -> None:
    """End processes that nobody uses any more, and wait for it."""
    for process in processes:
        process.interrupt()
    while processes:
        processes.pop().wait_for_end()
