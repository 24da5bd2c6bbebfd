"""The threads that compute products and recurrent mixers of the C library for networks computed layer by layer."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from kernels.cpu.library import load

_num_threads: int | None = None


def set_num_threads(threads: int) -> None:
    """Set the threads of later calls, the caller included; as many as PyTorch has before the first call of this."""
    global _num_threads  # noqa: PLW0603 - one number for a process, as that of PyTorch
    _num_threads = threads


def call(name: str, argument: ctypes.Structure) -> None:
    """Call a function of the library with the process's workers and a structure; one call at a time.

    Raises:
        MemoryError: memory does not suffice.
    """
    function, workers = _bound(name, _num_threads or torch.get_num_threads())
    if function(workers, ctypes.byref(argument)):
        raise MemoryError("no memory for the rows of a step")


@functools.cache
def _bound(name: str, threads: int) -> tuple[Any, ctypes.c_void_p]:
    library = load()
    assert not isinstance(library, str), library
    function = getattr(library, name)
    function.restype = ctypes.c_int64
    return function, _workers(threads)


@functools.cache
def _workers(threads: int) -> ctypes.c_void_p:
    """Start workers, which end with the process."""
    library = load()
    assert not isinstance(library, str), library
    library.tessera_workers.restype = ctypes.c_void_p
    workers = ctypes.c_void_p(library.tessera_workers(ctypes.c_int64(threads)))
    if not workers.value:
        raise MemoryError(f"the CPU library cannot start {threads} threads")
    return workers
