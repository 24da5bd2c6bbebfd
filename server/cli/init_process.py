"""The first process of a container: it passes signals on to the service, its child, and waits for orphans.

The system gives processes whose parent has ended to the first one, and they stay in its table until it waits for them.
The service cannot do that beside its own work: waiting for any child would take the exit codes that others wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_PR_GET_CHILD_SUBREAPER: Final = 37
_KILLED: Final = 128
"""Exit codes from here on stand for signals, as in shells."""
# Those of a fault in this process itself, and those that cannot be caught.
_OWN: Final = frozenset(
    {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP,
     signal.SIGABRT, signal.SIGSYS}
)  # fmt: skip


def adopt_orphans() -> None:
    """Continue in a child process if the system gives orphans to this one, which then waits for them.

    Otherwise nothing happens but that exit codes of child processes can be waited for. Call it before the process has
    threads. If the system refuses the child, this process continues, and orphans stay.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if os.getpid() != 1 and not _is_subreaper():
        return
    passed = signal.valid_signals() - _OWN
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed)
    try:
        child = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sys.stderr.write(f"tessera: orphaned processes are not waited for: {error}\n")
        return
    if child:
        _wait(child, passed)
    _take_terminal()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_subreaper() -> bool:
    """Return whether this process was made the parent of the orphans among its descendants (Linux)."""
    found = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


def _take_terminal() -> None:
    """Make this process a group of its own, in the foreground: Ctrl-C goes to it alone, and is not passed on too."""
    with contextlib.suppress(OSError):
        in_foreground = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
        os.setpgid(0, 0)
        if in_foreground:
            os.tcsetpgrp(0, os.getpgrp())


def _wait(child: int, passed: set[signal.Signals]) -> NoReturn:
    """Pass signals on and wait for orphans until the child ends; then end with its exit code."""
    while True:
        number = signal.sigwait(passed)
        if number != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
            continue
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    os._exit(code if code >= 0 else _KILLED - code)
