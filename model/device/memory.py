"""Measures memory: free memory of a device or container, and the peak use of a piece of work."""

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
        device: a GPU or the CPU. On a GPU, memory that PyTorch keeps for reuse does not count as free (see
            `release_cached`).
        cgroup: cgroup v2 folder with the container's limits, for the CPU.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo_available() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min(free, _container_free(cgroup)))


def release_cached(device: torch.device) -> None:
    """Release the GPU memory that PyTorch keeps for reuse; does nothing on a CPU."""
    if device.type == "cuda":
        gc.collect()  # tensors in reference cycles count as used until then
        torch.cuda.empty_cache()


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Measure the peak GPU memory of the enclosed work.

    Yields:
        A function that returns the peak so far, in bytes above the initial use; 0 on a CPU. It counts all memory that
        PyTorch reserves, including gaps between tensors.
    """
    if device.type != "cuda":
        yield lambda: 0
        return
    release_cached(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    yield lambda: torch.cuda.max_memory_reserved(device) - before


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, judged by PyTorch's exception type or by a library's message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text
    )


def _container_free(cgroup: Path) -> int:
    """Return the bytes below the container's limit; inactive cached file pages count as free: the kernel drops them."""
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
