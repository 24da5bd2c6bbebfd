"""Counts the processors that this process may use, and chooses the number of the engine's threads. Imports no PyTorch.

Three things limit a process: the processors that it may run on (`taskset`, `docker run --cpuset-cpus`), the processor
time of its control groups (`docker run --cpus`, Kubernetes' limits), and the physical cores, of which each may be two
logical processors: two threads on one core share its arithmetic units and do not multiply faster than one.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class UsableCPUs:
    """The processors that a process may use; each number is at least 1.

    Attributes:
        logical: logical processors, at most `quota` of them.
        cores: physical cores, at most `quota` of them; on macOS only performance cores.
        quota: whole processors in the processor time of the control groups; None without a limit.
    """

    logical: int
    cores: int
    quota: int | None = None

    def __str__(self) -> str:
        """Return the numbers for the log."""
        limit = "" if self.quota is None else f", limited to the time of {self.quota}"
        return f"{self.cores} physical cores ({self.logical} logical processors{limit})"


def usable_cpus(root: Path = _ROOT) -> UsableCPUs:
    """Count the processors that this process may use now.

    Args:
        root: folder with `proc` and `sys`.
    """
    if sys.platform == "darwin":
        return _usable_on_macos(read_sysctl)
    allowed = _allowed()
    quota = _quota(root)
    most = sys.maxsize if quota is None else quota
    return UsableCPUs(
        logical=min(len(allowed), most),
        cores=min(_physical_cores(allowed, root), most),
        quota=quota,
    )


def default_engine_threads(cpus: UsableCPUs, *, synchronous: bool) -> int:
    """Return the number of threads that compute a step, unless the operator sets it.

    Args:
        cpus: what the process may use.
        synchronous: whether an operation divides its work into equal parts and waits for all threads, as PyTorch does.
            A thread that has no core, because the front end runs there, then delays each operation; so one logical
            processor stays free. Threads that take parts of the work as they get to them delay nothing: there it is
            one thread for each physical core.
    """
    return max(1, min(cpus.cores, cpus.logical - 1)) if synchronous else cpus.cores


def read_sysctl(name: str) -> int | None:
    """Read a 32-bit value of the kernel of macOS; None if there is no such value."""
    value, size = ctypes.c_int32(0), ctypes.c_size_t(4)
    try:
        read = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):  # another system
        return None
    failed = read(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.value


def _usable_on_macos(read: Callable[[str], int | None]) -> UsableCPUs:
    """Count with `sysctl`. An efficiency core takes several times as long for its part, for which the others wait."""
    logical = os.cpu_count() or 1
    cores = read("hw.perflevel0.physicalcpu") or read("hw.physicalcpu") or logical
    return UsableCPUs(logical, min(cores, logical))


def _allowed() -> frozenset[int]:
    """Return the ids of the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _physical_cores(allowed: frozenset[int], root: Path) -> int:
    """Count the cores of some logical processors; one whose core is not known counts as a core."""
    topology = "sys/devices/system/cpu/cpu{}/topology"
    return len({_core(root / topology.format(cpu)) or cpu for cpu in allowed})


def _core(topology: Path) -> tuple[str, str, str] | None:
    package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
    if package is None or core is None:
        return None
    # Ids of cores are unique within a die only.
    return package, _read(topology / "die_id") or "", core


def _quota(root: Path) -> int | None:
    """Return the whole processors that the control groups grant, at least 1; None without a limit."""
    shares = list(_shares(root))
    return max(1, math.floor(min(shares))) if shares else None


def _shares(root: Path) -> Iterator[float]:
    """Yield the processors that each limit of this process's control groups grants.

    The processor time of a group is limited by its own limit and those of all groups above it. In a container, the
    process's path may be that on the host, which does not exist here: the mounted group is then the container's own.
    """
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part and part != ".."]
        groups = ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]
        if not controllers:
            for group in groups:
                yield from _share(_read(mount / group / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for folder in (
                mount / name / group for name in (controllers, "cpu") for group in groups
            ):
                quota, period = (
                    _read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")
                )
                yield from _share(f"{quota} {period}")


def _share(text: str | None) -> Iterator[float]:
    """Yield the quota, in processors, of `QUOTA PERIOD`; nothing if there is no limit ("max" or -1)."""
    with contextlib.suppress(ValueError):
        quota, period = map(int, (text or "").split())
        if quota > 0 and period > 0:
            yield quota / period


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
