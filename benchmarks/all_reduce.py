"""Measures the all-reduce of tensor parallelism on several GPUs, in a recording, beside NCCL's.

    python -m benchmarks.all_reduce [--ranks 2] [--sizes 65536 2097152] [--out results/]

It compares the sums first: 1,000 replays must have the bits of the sum in the order of the ranks.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from benchmarks.rank_processes import main, slowest
from kernels.collective.communicator import OrderedSum
from kernels.collective.one_shot import OneShotSum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels.collective.communicator import TorchCommunicator

_COLUMNS = 1024
_SIZES = [2048 * 4**i for i in range(6)]
"""Bytes."""
_CALLS = 56
"""Calls of a recording: two for each of 28 layers."""
_CHANGES = 100
_REPLAYS = 10


def _record(compute: Callable[[], object], calls: int = _CALLS) -> torch.cuda.CUDAGraph:
    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            compute()
    return graph


def _microseconds(compute: Callable[[], object], replays: int = 50) -> float:
    """Return the time of a call, the largest of all ranks."""
    graph = _record(compute)
    for _ in range(5):
        graph.replay()
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # of PyTorch
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # of PyTorch
    distributed.barrier()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return slowest(start.elapsed_time(end) * 1000 / replays / _CALLS)


def _check(communicator: TorchCommunicator, one_shot: OneShotSum, x: Tensor) -> None:
    """Raise unless replays have the bits of the sum in the order of the ranks, while the parts change."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    graph = _record(lambda: out.copy_(one_shot(x)), calls=3)
    wrong = torch.zeros((), dtype=torch.int64, device=x.device)
    for _ in range(_CHANGES):
        x.normal_()
        expected = OrderedSum.all_reduce(communicator, x)  # by gathering
        for _ in range(_REPLAYS):
            out.fill_(float("nan"))
            graph.replay()
            wrong += (out != expected).sum()
    if wrong.item():
        raise AssertionError(f"{wrong.item()} elements of the sums of {list(x.shape)} differ")


def measure(communicator: TorchCommunicator, sizes: list[int]) -> list[dict[str, Any]]:
    """Check and measure each size, bytes, on every rank."""
    device = torch.device("cuda", communicator.rank)
    one_shot = OneShotSum(communicator.rank, communicator.size, device)
    rows = []
    for num_bytes in sizes:
        torch.manual_seed(communicator.rank)
        x = torch.randn(num_bytes // 2 // _COLUMNS, _COLUMNS, device=device).bfloat16()
        assert one_shot.supports(x), num_bytes
        _check(communicator, one_shot, x)
        row: dict[str, Any] = {"ranks": communicator.size, "bytes": num_bytes}
        for name, compute in (("one_shot_us", one_shot), ("nccl_us", distributed.all_reduce)):
            row[name] = round(_microseconds(functools.partial(compute, x)), 2)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main("all-reduce", __doc__ or "", "sizes", _SIZES, measure)
