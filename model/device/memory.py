"""Measures memory: what is free on a device or within a container's limit, and what a piece of work takes."""

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
    """Return the bytes that this process can allocate now, within the limit of its container.

    Args:
        device: a GPU, where memory that PyTorch keeps for reuse does not count (see `release_cached`), or the CPU.
        cgroup: folder of the container's limits (version 2), for the CPU.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo_available() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min(free, _container_free(cgroup)))


def release_cached(device: torch.device) -> None:
    """Return the memory that PyTorch keeps for reuse to a GPU; does nothing on a CPU."""
    if device.type == "cuda":
        gc.collect()  # tensors in reference cycles count as used until then
        torch.cuda.empty_cache()


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Measure the peak of the GPU memory that the enclosed work allocates.

    Yields:
        A function that returns the peak so far, in bytes above what was allocated at the beginning; 0 on a CPU. It
        counts what PyTorch reserves, gaps between tensors included.
    """
    if device.type != "cuda":
        yield lambda: 0
        return
    release_cached(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    yield lambda: torch.cuda.max_memory_reserved(device) - before


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device has too little memory: by PyTorch's own type or by a library's message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text
    )


def _container_free(cgroup: Path) -> int:
    """Return the bytes below the container's limit; cached file pages count as free, since the kernel drops them."""
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
