"""Setup of the service's processes: garbage collection, library threads, and a child's tie to its parent."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from server.engine.core.start_checks import StartupError
from server.standard_error import drain

ConfigT = TypeVar("ConfigT")

_FEWEST_DESCRIPTORS = 64
_ENOUGH_DESCRIPTORS = 1 << 16
_PR_SET_PDEATHSIG = 1
_LINES_SECONDS = 0.2


def set_passive_openmp_wait() -> None:
    """Make OpenMP's idle threads sleep instead of spin. Call it before PyTorch is imported.

    A spinning thread takes the core that the working thread needs if other processes are busy: 30 ms per token instead
    of 4 on two cores with two busy neighbours.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def disable_tokenizer_threads() -> None:
    """Make the tokenizers library work in the calling thread. Call it before the first text is tokenized.

    By default it hands even a single text to its own thread pool, and the caller waits until two threads wake up.
    Child processes inherit the setting.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def disable_nvlink_multicast() -> None:
    """Keep NCCL and PyTorch from sums inside the NVLink switch. Call it before they are initialized.

    Those sums have another order for each size of a tensor. Child processes inherit the setting.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def keep_nccl_on_loopback() -> None:
    """Make NCCL listen on the loopback interface alone. Call it before it is initialized.

    Its ranks, which are on one host, find each other over TCP, on the first interface of the machine by default.
    `NCCL_SOCKET_IFNAME` of the operator has precedence. Child processes inherit the setting.
    """
    os.environ.setdefault(
        "NCCL_SOCKET_IFNAME", "=lo"
    )  # no other interface whose name begins with it
    # A service of NCCL for its diagnostic program, on port 28028.
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to what it may have. Child processes inherit it.

    Many systems give 1,024, which a thousand idle connections use up. Far higher limits are not used: with one of 10^9,
    programs that close every possible descriptor take minutes to start.

    Raises:
        StartupError: it may have too few for the service's own sockets and pipes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _ENOUGH_DESCRIPTORS if hard == unlimited else min(hard, _ENOUGH_DESCRIPTORS)
    if soft != unlimited and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS may allow fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if 0 <= hard < _FEWEST_DESCRIPTORS:
        raise StartupError(
            f"the limit of open files is {hard} (ulimit -n), and the service needs at least {_FEWEST_DESCRIPTORS}"
        )


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Import modules without garbage collection, and exclude them from later collections.

    The collector would scan the growing set of objects again and again without result, which takes a sixth of the time
    of importing PyTorch.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_startup_objects() -> None:
    """Exclude the existing objects from garbage collection: they live until the process ends."""
    gc.collect()
    gc.freeze()


def end_with_parent() -> None:
    """Make the system kill this process when the thread that started it ends, on Linux.

    It also ends a process that was stopped, and so cannot notice that its standard input ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def dump_stacks_on_signal() -> None:
    """Make SIGUSR1, and signals of a crash, write the stacks of all threads to standard error.

    It works while the process hangs with Python's global lock. The parent sends the signal before it kills the process.
    """
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def read_config(kind: type[ConfigT]) -> ConfigT | None:
    """Read the first line of standard input, which may be longer than a pipe's buffer, as JSON.

    Returns:
        None if the input ends before the line does: the parent has gone.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (part := os.read(sys.stdin.fileno(), 65536)):
            return None
        line += part
    return msgspec.json.decode(line, type=kind)


def exit_with_parent() -> None:
    """Block until standard input ends, which means that the parent has gone, then end this process."""
    continue_at_end_of_parent()
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):
            pass
    drain(_LINES_SECONDS)
    os._exit(0)


def continue_at_end_of_parent() -> None:
    """Have the system continue this process, should it be stopped, when its parent ends, so that it notices."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
