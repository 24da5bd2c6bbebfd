"""Runs a function in one process per GPU, connected by `torch.distributed`, for benchmarks."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, multiprocessing

from kernels.collective.communicator import TorchCommunicator

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.queues import Queue

_MOST_SECONDS = 600


def run_ranks(
    compute: Callable[..., list[dict[str, Any]]], size: int, *arguments: object
) -> list[dict[str, Any]]:
    """Call `compute(communicator, *arguments)` in each of `size` processes and return the first one's rows.

    Args:
        compute: a function of a module.
        size: number of processes, each with a GPU of its own.
        arguments: can be pickled.

    Raises:
        RuntimeError: a process failed.
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_run, args=(rank, size, folder, results, compute, arguments), daemon=True
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_MOST_SECONDS)
    codes = [process.exitcode for process in processes]
    if any(codes) or None in codes:
        raise RuntimeError(f"the processes of the ranks ended with {codes}")
    rows: list[dict[str, Any]] = results.get()
    return rows


def _run(
    rank: int,
    size: int,
    folder: str,
    results: Queue[Any],
    compute: Callable[..., list[dict[str, Any]]],
    arguments: tuple[object, ...],
) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    communicator = TorchCommunicator(rank, size, f"{folder}/store", device)
    rows = compute(communicator, *arguments)
    if not rank:
        results.put(rows)
    distributed.barrier()
    distributed.destroy_process_group()


def slowest(milliseconds: float) -> float:
    """Return the largest time of all ranks."""
    found = torch.tensor([milliseconds])
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return float(found)
