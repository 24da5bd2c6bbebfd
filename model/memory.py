"""How much memory is free now, on a device and within a container's limit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, cgroup: Path = _CGROUP) -> int:
    """Memory that this process may take now, in bytes, within the limit of its container.

    Args:
        device: whose memory.
        cgroup: where the container's limits stand (version 2), on a CPU.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo_available() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min(free, _container_free(cgroup)))


def _container_free(cgroup: Path) -> int:
    """What the container's limit leaves, in bytes; cached file pages are given up when needed."""
    limit, used, stat = (cgroup / f"memory.{name}" for name in ("max", "current", "stat"))
    if not limit.exists() or (text := limit.read_text().strip()) == "max":
        return sys.maxsize
    counters = dict(line.split() for line in stat.read_text().splitlines())
    return int(text) - int(used.read_text()) + int(counters.get("inactive_file", 0))


def _meminfo_available() -> int:
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
