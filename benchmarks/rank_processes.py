"""Runs a benchmark in one process per GPU, connected by `torch.distributed`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from multiprocessing.reduction import DupFd as Inherited
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import distributed, multiprocessing

from benchmarks.report import add_bookkeeping, write_report
from kernels.collective.nccl import NCCLCommunicator
from server.engine.link.engine_process.process_setup import (
    disable_nvlink_multicast,
    keep_nccl_on_loopback,
)
from server.engine.link.engine_process.rank_processes import RankEndpoints

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.queues import Queue

    from kernels.collective.endpoint import RankEndpoint

Measure: TypeAlias = "Callable[[NCCLCommunicator, list[int]], list[dict[str, Any]]]"

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
    with contextlib.closing(RankEndpoints(size)) as endpoints:
        processes = []
        for endpoint in endpoints.ranks:
            fds = {fd: Inherited(fd) for fd in endpoints.inherited(endpoint.rank)}
            process = context.Process(
                target=_run, args=(endpoint, fds, results, measure, numbers), daemon=True
            )
            process.start()
            processes.append(process)
    for process in processes:
        process.join(_MOST_SECONDS)
    codes = [process.exitcode for process in processes]
    if any(codes) or None in codes:
        raise RuntimeError(f"the processes of the ranks ended with {codes}")
    rows: list[dict[str, Any]] = results.get()
    return rows


def _run(
    inherited: RankEndpoint,
    fds: dict[int, Any],
    results: Queue[Any],
    measure: Measure,
    numbers: list[int],
) -> None:
    disable_nvlink_multicast()
    keep_nccl_on_loopback()
    here = {fd: inherited_fd.detach() for fd, inherited_fd in fds.items()}
    endpoint = dataclasses.replace(
        inherited,
        peers=tuple(here.get(it, -1) for it in inherited.peers),
        memory=here[inherited.memory],
        store=here[inherited.store],
    )
    device = torch.device("cuda", endpoint.rank)
    torch.cuda.set_device(device)
    communicator = NCCLCommunicator(endpoint, device)
    rows = measure(communicator, numbers)
    if not endpoint.rank:
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


def slowest(communicator: NCCLCommunicator, milliseconds: float) -> float:
    """Return the largest time of all ranks."""
    return float(communicator.all_gather(torch.tensor([milliseconds])).max())
