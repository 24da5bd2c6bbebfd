"""Measures the all-reduce of tensor parallelism on several GPUs, in a recording, beside NCCL's.

    python -m benchmarks.all_reduce [--ranks 2] [--sizes 65536 2097152] [--out results/]

It compares results first: 1,000 replays must have the bits of the sum in the order of the ranks, and 100 those of the
residual stream to which it is added. `norm` is an RMS norm of that stream after the addition: in the same launch, in
one of its own after our sum, or after NCCL's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from benchmarks.rank_processes import main, slowest
from kernels.collective.one_shot import OneShotSum
from kernels.linear.around import add_and_normalize
from kernels.linear.weights import Norm
from kernels.norms.pytorch import sum_in_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels.collective.nccl import NCCLCommunicator

_COLUMNS = 4096
_SIZES = [8192 * rows for rows in (1, 4, 8, 16, 64, 256)]
"""Bytes."""
_EPS = 1e-6
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


def _microseconds(
    communicator: NCCLCommunicator, compute: Callable[[], object], replays: int = 50
) -> float:
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
    return slowest(communicator, start.elapsed_time(end) * 1000 / replays / _CALLS)


def _check(communicator: NCCLCommunicator, one_shot: OneShotSum, x: Tensor) -> None:
    """Raise unless replays have the bits of the sum in the order of the ranks, while the parts change."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    graph = _record(lambda: out.copy_(one_shot(x)), calls=3)
    wrong = torch.zeros((), dtype=torch.int64, device=x.device)
    for _ in range(_CHANGES):
        x.normal_()
        expected = sum_in_order(communicator.all_gather(x))
        for _ in range(_REPLAYS):
            out.fill_(float("nan"))
            graph.replay()
            wrong += (out != expected).sum()
    if wrong.item():
        raise AssertionError(f"{wrong.item()} elements of the sums of {list(x.shape)} differ")


def _check_norm(communicator: NCCLCommunicator, one_shot: OneShotSum, x: Tensor) -> None:
    """Raise unless replays add the sum to the residual stream and normalize it, with the same bits on all ranks."""
    generator = torch.Generator(x.device).manual_seed(0)
    start = torch.randn(x.shape, device=x.device, generator=generator).bfloat16()
    norm = Norm(torch.linspace(0.5, 1.5, x.shape[1], device=x.device).bfloat16(), _EPS)
    hidden, out, parts = start.clone(), torch.empty_like(start), x[None]
    graph = _record(
        lambda: out.copy_(one_shot.add_and_normalize(parts, hidden, *norm, pdl=True)), calls=3
    )
    for _ in range(_CHANGES):
        x.normal_()
        total = sum_in_order(communicator.all_gather(x))
        expected = start
        for _ in range(3):
            expected = (expected.float() + total).bfloat16()
        hidden.copy_(start)
        graph.replay()
        if not torch.equal(hidden, expected):
            raise AssertionError(f"the residual stream of {list(x.shape)} differs")
        normalized = add_and_normalize(norm, expected, None, pdl=False)
        torch.testing.assert_close(out, normalized, rtol=2**-7, atol=2**-7)
        first = out.clone()
        communicator.broadcast(first)
        if not torch.equal(out, first):
            raise AssertionError(f"the ranks' norms of {list(x.shape)} differ")


def measure(communicator: NCCLCommunicator, sizes: list[int]) -> list[dict[str, Any]]:
    """Check and measure each size, bytes, on every rank."""
    device = torch.device("cuda", communicator.rank)
    one_shot = OneShotSum(communicator.rank, communicator.size, device)
    rows: list[dict[str, Any]] = []
    for num_bytes in sizes:
        torch.manual_seed(communicator.rank)
        x = torch.randn(num_bytes // 2 // _COLUMNS, _COLUMNS, device=device).bfloat16()
        assert one_shot.supports(x), num_bytes
        assert one_shot.normalizes(x), num_bytes
        _check(communicator, one_shot, x)
        _check_norm(communicator, one_shot, x)
        row: dict[str, Any] = {"ranks": communicator.size, "bytes": num_bytes}
        for name, compute in _contenders(one_shot, x).items():
            row[f"{name}_us"] = round(_microseconds(communicator, compute), 2)
        rows.append(row)
    return rows


def _contenders(one_shot: OneShotSum, x: Tensor) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name; the residual stream stays finite, because its parts are zero."""
    hidden, parts = torch.randn_like(x), torch.zeros_like(x)[None]
    norm = Norm(torch.ones_like(x[0]), _EPS)

    def nccl_norm() -> Tensor:
        distributed.all_reduce(parts)
        return add_and_normalize(norm, hidden, parts, pdl=True)

    return {
        "one_shot": lambda: one_shot(x),
        "nccl": lambda: distributed.all_reduce(x),
        "one_shot_norm": lambda: one_shot.add_and_normalize(parts, hidden, *norm, pdl=True),
        "one_shot_then_norm": lambda: add_and_normalize(
            norm, hidden, one_shot(parts[0])[None], pdl=True
        ),
        "nccl_then_norm": nccl_norm,
    }


if __name__ == "__main__":
    main("all-reduce", __doc__ or "", "sizes", _SIZES, measure)
