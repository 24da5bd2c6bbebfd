"""Measures memory: free memory of a device or container, and the peak use of a piece of work. Returns pages early."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from model.device.host_memory import CGROUP, free_host_bytes


def free_bytes(device: torch.device, cgroup: Path = CGROUP) -> int:
    """Return the bytes that this process can allocate now, within the limit of its container.

    Args:
        device: a GPU or the CPU. On a GPU, memory that PyTorch keeps for reuse does not count as free (see
            `release_cached`).
        cgroup: cgroup v2 folder with the container's limits, for the CPU.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes(cgroup)


def gpu_use(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU, and those that PyTorch holds of them in this process."""
    return int(torch.cuda.mem_get_info(device)[1]), int(torch.cuda.memory_reserved(device))


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


def drop_pages(tensor: Tensor) -> None:
    """Return the pages of a tensor on a CPU to the system, apart from those that it shares with its neighbours.

    Those of a mapped file are read again if they are needed. In other memory the values become 0. Does nothing where
    the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED)
        )
