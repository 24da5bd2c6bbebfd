"""Measures sums and gathers of ranks on CPUs: by the memory that they share, and by gloo over loopback.

    python -m benchmarks.host_all_reduce [--ranks 2] [--rows 1 64 512] [--columns 384] [--out results/]

Times are of rank 0; the ways take turns, so that other work of the machine touches both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from benchmarks.report import add_bookkeeping, write_report
from kernels.collective.shared_memory import SharedMemoryCommunicator
from kernels.norms.pytorch import sum_in_order
from server.engine.link.engine_process.rank_processes import RankEndpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_ROUNDS = 20
_CALLS = 50


def _gloo_sum(x: Tensor, size: int) -> Tensor:
    parts = x.new_empty(size, *x.shape)
    distributed.all_gather_into_tensor(parts.flatten(0, 1), x)
    return sum_in_order(parts)


def _times(compute: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        compute()
        found.append(1e6 * (time.perf_counter() - start))
    return found


def _measure(endpoints: RankEndpoints, rank: int, options: argparse.Namespace) -> list[Any]:
    torch.set_num_threads(1)
    endpoints.close_all_but(rank)
    communicator = SharedMemoryCommunicator(endpoints.ranks[rank])
    distributed.init_process_group(
        "gloo", init_method=f"file://{options.store}", rank=rank, world_size=communicator.size
    )
    rows: list[dict[str, Any]] = []
    for count in options.rows:
        x = torch.randn(count, options.columns)
        ways: dict[str, Callable[[], Tensor]] = {
            "shared_memory": lambda x=x: communicator.all_reduce(x),  # type: ignore[misc]  # of one tensor
            "gloo": lambda x=x: _gloo_sum(x, communicator.size),  # type: ignore[misc]  # of one tensor
        }
        if not torch.equal(*(compute() for compute in ways.values())):
            raise AssertionError(f"the sums of {count} rows differ")
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_ROUNDS):
            for name, compute in ways.items():
                found[name] += _times(compute)
        row: dict[str, Any] = {"ranks": communicator.size, "rows": count, "bytes": x.nbytes}
        for name, times in found.items():
            ordered = sorted(times)
            row[f"{name}_us"] = round(ordered[len(ordered) // 2], 1)
            row[f"{name}_p10_us"] = round(ordered[len(ordered) // 10], 1)
        rows.append(row)
    return rows


def main() -> None:
    """Measure on all ranks, processes that fork from this one, and write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 512])
    parser.add_argument("--columns", type=int, default=384)
    add_bookkeeping(parser)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(RankEndpoints(options.ranks)) as endpoints,
    ):
        options.store = f"{folder}/store"
        for rank in range(1, options.ranks):
            if not os.fork():
                _measure(endpoints, rank, options)
                os._exit(0)
        rows = _measure(endpoints, 0, options)
        for _ in range(1, options.ranks):
            os.wait()
    write_report("host-all-reduce", rows, ("torch",), folder=options.out, revision=options.commit)


if __name__ == "__main__":
    main()
