"""Runs a benchmark in one process per GPU, connected by `torch.distributed`."""

from __future__ import annotations

import argparse
import tempfile
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import distributed, multiprocessing

from benchmarks.report import add_bookkeeping, write_report
from kernels.collective.communicator import TorchCommunicator
from server.engine.link.engine_process.process_setup import disable_nvlink_multicast

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.queues import Queue

Measure: TypeAlias = "Callable[[TorchCommunicator, list[int]], list[dict[str, Any]]]"

_MOST_SECONDS = 600


def run_ranks(measure: Measure, size: int, numbers: list[int]) -> list[dict[str, Any]]:
    """Call `measure(communicator, numbers)` in each of `size` processes and return the first one's rows.

    Args:
        measure: a function of a module.
        size: number of processes, each with a GPU of its own.
        numbers: to measure.

    Raises:
        RuntimeError: a process failed.
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_run, args=(rank, size, folder, results, measure, numbers), daemon=True
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
    measure: Measure,
    numbers: list[int],
) -> None:
    disable_nvlink_multicast()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    communicator = TorchCommunicator(rank, size, f"{folder}/store", device)
    rows = measure(communicator, numbers)
    if not rank:
        results.put(rows)
    distributed.barrier()
    distributed.destroy_process_group()


def main(topic: str, doc: str, option: str, default: list[int], measure: Measure) -> None:
    """Read the command line, measure on all ranks and write one table.

    Args:
        topic: as for `write_report`.
        doc: the script's docstring.
        option: name of the numbers to measure.
        default: numbers, if the command line has none.
        measure: called on each rank with its communicator and the numbers.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(f"--{option}", type=int, nargs="+", default=default)
    add_bookkeeping(parser)
    options = parser.parse_args()
    rows = run_ranks(measure, options.ranks, getattr(options, option))
    write_report(
        topic, rows, ("torch", "triton"), device="cuda", folder=options.out, revision=options.commit
    )


def slowest(milliseconds: float) -> float:
    """Return the largest time of all ranks."""
    found = torch.tensor([milliseconds])
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return float(found)
