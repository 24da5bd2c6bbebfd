"""How much memory is free now, on a device and within a container's limit, and how much a piece of work takes."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, cgroup: Path = _CGROUP) -> int:
    """Memory that this process may take now, in bytes, within the limit of its container.

    Args:
        device: whose memory; of a GPU's, what PyTorch keeps for reuse is not free: see `release_cached`.
        cgroup: where the container's limits stand (version 2), on a CPU.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo_available() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min(free, _container_free(cgroup)))


def release_cached(device: torch.device) -> None:
    """Give back to a GPU what PyTorch keeps for reuse; nothing to do on a CPU."""
    if device.type == "cuda":
        gc.collect()  # tensors in reference cycles are in use until then
        torch.cuda.empty_cache()


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Measure what the enclosed work takes from a GPU at most, on top of what is taken when it begins.

    Yields:
        A function that returns the bytes so far; 0 on a CPU. It counts what PyTorch takes from the device, gaps between
        tensors included.
    """
    if device.type != "cuda":
        yield lambda: 0
        return
    release_cached(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    yield lambda: torch.cuda.max_memory_reserved(device) - before


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had too little memory: PyTorch has a type for it, the libraries it calls a message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text
    )


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
