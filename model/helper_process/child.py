"""The side of a helper process: its limits, and its answers to tasks; see `model.helper_process.process`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from model.device.niceness import give_way
from model.helper_process.process import REPLY, TASK

_INPUT: Final = 0
_OUTPUT: Final = 1
_FIRST_BYTES: Final = 1 << 16
_MORE_BYTES: Final = 1 << 20
_OOM_SCORE: Final = "1000"
"""Where memory runs out, the system ends this process before the service."""
# Go to all processes of a service; the parent decides when this one ends.
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38


def limit(memory_bytes: int) -> None:
    """Limit this process's memory and priority, and let it write no file and leave no core dump.

    Called first, in the main thread.

    Args:
        memory_bytes: of its address space.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # only Linux has it: memory ends before the limit below
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    if sys.platform == "linux":  # if it is stopped when its parent ends, it must notice
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    give_way()
    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        _lower(name, memory_bytes)
    for name in ("RLIMIT_CORE", "RLIMIT_FSIZE"):
        _lower(name, 0)


def seal() -> None:
    """Let this process open no file and no socket, start no process (except as root), and gain no privileges."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for name in ("RLIMIT_NPROC", "RLIMIT_NOFILE"):  # the descriptors that are open stay so
        _lower(name, 0)


def read_config() -> bytes | None:
    """Return the first message, which `serve` answers; None if there is none."""
    message = _read()
    return None if message is None else message[0]


def serve(do: Callable[[bytes], bytes]) -> None:
    """Say that this process is ready, and answer tasks until the socket is closed.

    A task that takes more than its processor time ends the process, by SIGPROF.
    """
    _answer(b"", 0.0)
    while (message := _read()) is not None:
        task, seconds = message
        # The clock of the process is imprecise while its timer runs.
        start = time.thread_time()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        content = do(task)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(content, time.thread_time() - start)


def _lower(name: str, most: int) -> None:
    """Lower a limit of this process; one that is lower already stays, and so does one that the system lacks."""
    kind = getattr(resource, name, None)
    if kind is not None:
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _read() -> tuple[bytes, float] | None:
    """Return the next message and its processor time. Nothing follows it, so what is there may be read at once."""
    received = b""
    while len(received) < TASK.size:
        part = os.read(_INPUT, _FIRST_BYTES)
        if not part:
            return None
        received += part
    size, seconds = TASK.unpack_from(received)
    parts = [received[TASK.size :]]
    left = size - len(parts[0])
    while left:
        parts.append(os.read(_INPUT, min(left, _MORE_BYTES)))
        if not parts[-1]:
            return None
        left -= len(parts[-1])
    return b"".join(parts), seconds


def _answer(content: bytes, seconds: float) -> None:
    header = REPLY.pack(len(content), seconds, time.process_time())
    left = [memoryview(header), memoryview(content)]
    while left:
        written = os.writev(_OUTPUT, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
