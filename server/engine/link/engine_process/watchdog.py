"""Ends a process whose main thread hangs, after it has logged what all threads are doing.

A thread of the process watches the main thread, which is possible as long as that one does not hold Python's global
lock: not while it waits for a GPU, for a lock or for a file. A process that hangs with the lock, or was stopped, is
detected by another one because it is silent (`supervisor`, `hub`, `client`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from server.engine.core.messages import EngineHung, Heartbeat
from server.engine.link.silence import SilenceTimer, tick_seconds

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from server.engine.core.progress import Progress
    from server.engine.link.sockets import Connection

log = logging.getLogger("tessera")

HANG_EXIT_CODE: Final = 86
"""Exit code of a process that found itself hung."""

_REPORT_SECONDS: Final = 5.0
_LAST_SECONDS: Final = 0.5


class Watch(Protocol):
    """What a watchdog looks at. All methods are called on its thread."""

    period: float
    """Seconds between two calls of `check`."""

    def check(self) -> str | None:
        """Return why the process hangs, None if it does not."""

    def close(self) -> None:
        """Release what the watch has opened."""


class Watchdog:
    """Calls `check` of a watch on a thread, and ends the process when it returns a reason.

    Args:
        watch: looks for a hang.
        end_process: called with `HANG_EXIT_CODE`.
    """

    def __init__(self, watch: Watch, end_process: Callable[[int], object] = os._exit) -> None:
        self._watch = watch
        self._end_process = end_process
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to watch; does nothing if the watchdog was not started."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._watch.period):
                if reason := self._watch.check():
                    # Standard error may be what the main thread waits for.
                    report = threading.Thread(target=_report, args=(reason,), daemon=True)
                    with contextlib.suppress(RuntimeError):  # the system refuses the thread
                        report.start()
                        report.join(_REPORT_SECONDS)
                    self._watch.close()
                    self._end_process(HANG_EXIT_CODE)
                    return
        finally:
            self._watch.close()


def _report(reason: str) -> None:
    log.critical("%s; this process ends. What its threads are doing:", reason)
    dump_stacks()


def dump_stacks() -> None:
    """Write the stacks of all threads to standard error."""
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)


class EngineWatch:
    """Compares the duration of the engine's current activity with its limit, and sends heartbeats to the parent."""

    def __init__(self, connection: Connection, progress: Progress, hang_seconds: float) -> None:
        self.period = tick_seconds(hang_seconds)
        self._connection = connection
        self._progress = progress
        self._hang_seconds = hang_seconds
        self._silence = SilenceTimer(self.period)
        self._count = -1
        self._encoder = msgspec.msgpack.Encoder()

    def check(self) -> str | None:
        """Send a heartbeat; return what hangs, after it was sent to the parent too."""
        progress = self._progress
        # The count is read last, and `Progress.begin` changes it first: a changed activity comes with a changed count.
        # Otherwise the time without requests could count for the first activity after it.
        allowed = progress.allowed_seconds(self._hang_seconds)
        activity, num_tokens, count = progress.activity, progress.num_tokens, progress.count
        silent = self._silence.tick(alive=count != self._count)
        self._count = count
        self._send(Heartbeat(activity.value, count, num_tokens))
        if silent <= allowed:
            return None
        size = f" of {num_tokens} tokens" if num_tokens else ""
        doing = f"{activity.value}{size} for {silent:.1f} s"
        self._send(EngineHung(doing))
        return f"the engine hangs: it has been {doing}, and {allowed:.1f} s are allowed"

    def close(self) -> None:
        """Wait a moment until the messages are sent."""
        self._connection.flush(_LAST_SECONDS)

    def _send(self, message: Heartbeat | EngineHung) -> None:
        self._connection.send(self._encoder.encode(message))


class LoopWatch:
    """Detects that an event loop handles no callbacks. Create it on the thread of the loop.

    Args:
        loop: the event loop.
        hang_seconds: how long a callback may take.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, hang_seconds: float) -> None:
        self.period = tick_seconds(hang_seconds)
        self._loop = loop
        self._hang_seconds = hang_seconds
        self._silence = SilenceTimer(self.period)
        self._passes = 0
        self._seen = -1
        self._turn()

    def check(self) -> str | None:
        """Return for how long the loop has been stuck."""
        silent = self._silence.tick(alive=self._passes != self._seen)
        self._seen = self._passes
        if silent <= self._hang_seconds:
            return None
        return f"the event loop has been stuck for {silent:.1f} s"

    def close(self) -> None:
        """Do nothing: the timer ends with the loop."""

    def _turn(self) -> None:
        self._passes += 1
        self._loop.call_later(self.period, self._turn)
