"""Measures the memory of the host, within the limit of this process's container. Does not import PyTorch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes that this process can allocate now.

    Args:
        cgroup: cgroup v2 folder with the container's limits.
    """
    free = _meminfo_available() or _physical_bytes() // 2
    return max(0, min(free, _container_free(cgroup)))


def total_host_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes of the host or, if it is less, of the container's limit, whoever uses them now.

    Args:
        cgroup: cgroup v2 folder with the container's limits.
    """
    return min(_physical_bytes(), _container_limit(cgroup))


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_limit(cgroup: Path) -> int:
    limit = cgroup / "memory.max"
    if not limit.exists() or (text := limit.read_text().strip()) == "max":
        return sys.maxsize
    return int(text)


def _container_free(cgroup: Path) -> int:
    """Return the bytes below the container's limit; inactive cached file pages count as free: the kernel drops them."""
    if (limit := _container_limit(cgroup)) == sys.maxsize:
        return limit
    used, stat = (cgroup / f"memory.{name}" for name in ("current", "stat"))
    counters = dict(line.split() for line in stat.read_text().splitlines())
    return limit - int(used.read_text()) + int(counters.get("inactive_file", 0))


def _meminfo_available() -> int:
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
