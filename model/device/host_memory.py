"""Measures the memory of the host, within the limit of this process's container. Does not import PyTorch."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def free_host_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes that this process can allocate now.

    Args:
        cgroup: where the limits of containers and services are, of version 1 or 2.
    """
    free = _meminfo_available() or _physical_bytes() // 2
    return max(0, min(free, *(_free_in(it) for it in _groups(cgroup)), *_free_of_process()))


def total_host_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes of the host or, if it is less, of the limit of this process's container, whoever uses them now.

    Args:
        cgroup: as for `free_host_bytes`.
    """
    return min(_physical_bytes(), *(_limit_of(it) for it in _groups(cgroup)))


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(root: Path) -> list[Path]:
    """Return the folders of the groups whose limits hold for this process: its group and all that contain it.

    Without a namespace for groups, as for a service of systemd, its own group is not the root.
    """
    folders = [root, root / "memory"]
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / controllers
            group = base / path.lstrip("/")
            folders += [
                it for it in (group, *group.parents) if it.is_relative_to(base) and it != base
            ]
    return folders


def _limit_of(group: Path) -> int:
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (file := group / name).exists():
            text = file.read_text().strip()
            return sys.maxsize if text == "max" else int(text)
    return sys.maxsize


def _free_in(group: Path) -> int:
    """Return the bytes below a group's limit; inactive cached file pages count as free: the kernel drops them."""
    if (limit := _limit_of(group)) >= _physical_bytes():
        return sys.maxsize
    current = group / "memory.current"
    used, cached = (
        (current, "inactive_file")
        if current.exists()
        else (group / "memory.usage_in_bytes", "total_inactive_file")
    )
    counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return limit - int(used.read_text()) + int(counters.get(cached, 0))


def _free_of_process() -> list[int]:
    """Return the bytes that the limits of this process (`ulimit -v`, `ulimit -d`) leave; empty for none."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    limited = [(i, limit) for i, limit in zip((0, 5), limits, strict=True) if limit >= 0]
    sizes = Path("/proc/self/statm")
    if not limited or not sizes.exists():
        return []
    pages = sizes.read_text().split()
    return [limit - int(pages[i]) * os.sysconf("SC_PAGE_SIZE") for i, limit in limited]


def _meminfo_available() -> int:
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
