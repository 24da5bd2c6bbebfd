"""Runs a command in a child process, and ends whatever it leaves behind.

Ray starts several processes, and answers signals by itself while it starts them: it may end with status 15, hang, or
leave some of them. A parent without Ray ends the start at any moment, within limits of time. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START_SECONDS: Final = 10.0
"""How long the child has to end by itself, if a signal comes before it has started."""
_LEFT_SECONDS: Final = 5.0
"""How long processes that the child has left have to end by themselves; what is left then is killed."""
_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_DAY: Final = 86_400.0
_PARENT_DEATH_SIGNAL: Final = 1  # of prctl(2)
_CHILD_SUBREAPER: Final = 36


def run(command: Callable[[Callable[[], None]], int]) -> int:
    """Run a command in a child process until it ends; signals end it.

    Once the child has started, it gets SIGTERM for each signal. Before, it gets SIGTERM for the first and then has
    `START_SECONDS`; a second one kills it. All of its processes, and theirs, have ended when this returns. Only for the
    main thread of a program without others.

    Args:
        command: returns an exit status. Its argument is to be called when it has started and handles SIGTERM itself.

    Returns:
        The status; 0 if a signal ended the start.
    """
    _prctl(_CHILD_SUBREAPER, 1)  # what the child's processes leave becomes this one's
    # One that is ignored, as by nohup, stays so.
    signals = {it for it in _SIGNALS if signal.getsignal(it) is not signal.SIG_IGN}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals | {signal.SIGCHLD})
    parent = os.getpid()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_child(parent, mask)
        _run_and_exit(lambda: command(lambda: os.close(writing)))
    os.close(writing)
    os.set_blocking(reading, False)
    try:
        return _watch(child, signals, reading)
    finally:
        _end_descendants()


def _be_child(parent: int, mask: set[signal.Signals | int]) -> None:
    os.setpgid(0, 0)  # Ctrl-C goes to the parent alone, which passes it on
    _prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)  # it ended before
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run_and_exit(command: Callable[[], int]) -> NoReturn:
    """Exit without what the parent has registered for its own exit, and whatever Ray's threads do."""
    status = 1
    try:
        status = command()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201 - as Python does
    except BaseException:  # noqa: BLE001 - a child must not return into the parent's code
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _watch(child: int, signals: set[signal.Signals], starting: int) -> int:
    """Return the child's status when it has ended."""
    deadline: float | None = None
    while True:
        if (status := _reap(child)) is not None:
            return status if deadline is None else 0
        left = _DAY if deadline is None else max(0.0, deadline - time.monotonic())
        received = signal.sigtimedwait(signals | {signal.SIGCHLD}, left)
        if received is not None and received.si_signo == signal.SIGCHLD:
            continue
        if received is not None and deadline is None:
            if not _is_closed(starting):
                deadline = time.monotonic() + START_SECONDS
            os.kill(child, signal.SIGTERM)
        elif deadline is not None:
            os.kill(child, signal.SIGKILL)
            deadline = time.monotonic() + _DAY


def _is_closed(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False


def _reap(child: int) -> int | None:
    """Collect ended processes; returns the child's exit status if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            found = code if code >= 0 else 128 - code


def _end_descendants() -> None:
    """End the processes that are left, with SIGTERM and then SIGKILL."""
    number, deadline = signal.SIGTERM, time.monotonic() + _LEFT_SECONDS
    ended: set[int] = set()
    while pids := set(_descendants(os.getpid())):
        if time.monotonic() > deadline:
            number, ended = signal.SIGKILL, set()
        for pid in pids - ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        ended |= pids
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
        _reap(0)


def _descendants(pid: int) -> Iterator[int]:
    try:
        children = [
            int(it) for task in Path(f"/proc/{pid}/task").iterdir()
            for it in (task / "children").read_text().split()
        ]  # fmt: skip
    except OSError:  # it has ended
        return
    for child in children:
        yield child
        yield from _descendants(child)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
