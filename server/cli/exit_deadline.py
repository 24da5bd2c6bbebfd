"""Ends a process of the service in bounded time when it is to end, whatever its threads wait for."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from server.engine.link.spawn import descendants
from server.standard_error import drain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BACKSTOP_SECONDS: Final = 1.0
_EXIT_SECONDS: Final = 2.0
_LINES_SECONDS: Final = 0.3


def _exit_from_c(seconds: float) -> None:
    """End this process after a time, with the stacks in the log, by a thread that does not need Python's lock."""
    # Standard error may be one without a descriptor in another program.
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)


class ExitDeadline:
    """Kills the processes that this one has started and ends it at a time, unless it has ended before.

    A thread does it, so that the event loop and the main thread may be stuck. If it cannot run either, because a call
    holds Python's global lock, a thread of the C library ends the process a second later; the children then end because
    their input does.

    Args:
        end_process: called with the exit status.
        backstop: ends the process after some seconds if nothing else has.
    """

    def __init__(
        self,
        end_process: Callable[[int], object] = os._exit,
        backstop: Callable[[float], object] = _exit_from_c,
    ) -> None:
        self._end_process, self._backstop = end_process, backstop
        self._changed = threading.Condition()
        self._time, self._status = math.inf, 0
        self._thread: threading.Thread | None = None

    def set(self, seconds: float, status: int = 0) -> None:
        """End the process after a time, with this exit status; an earlier deadline stays."""
        with self._changed:
            self._status = status
            if time.monotonic() + seconds >= self._time:
                return
            self._time = time.monotonic() + seconds
            self._backstop(seconds + _BACKSTOP_SECONDS)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="exit", daemon=True)
                with contextlib.suppress(
                    RuntimeError
                ):  # there can be no thread; the backstop remains
                    self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while (left := self._time - time.monotonic()) > 0:
                self._changed.wait(left)
        import logging  # noqa: PLC0415 - slow, and the engine's process is started before it

        log = logging.getLogger("tessera")
        log.error("this process was to end, but still runs; ending it and its children")
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        drain(_LINES_SECONDS)
        self._end_process(self._status)


_deadline: Final = ExitDeadline()


def exit_within(seconds: float, status: int = 0) -> None:
    """Make sure that this process ends within a time; its children are killed if it does not."""
    _deadline.set(seconds, status)


@contextlib.contextmanager
def exit_bounded() -> Iterator[None]:
    """Run all of a process, which then has two seconds for its exit handlers and for threads that still work.

    Python would wait for the threads of pools without a limit.
    """
    status = 1
    try:
        yield
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise
    finally:
        exit_within(_EXIT_SECONDS, status)
