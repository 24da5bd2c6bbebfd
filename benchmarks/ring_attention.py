"""Measures ring attention on several GPUs beside one GPU: milliseconds of the forward and of the backward.

python -m benchmarks.ring_attention [--ranks 2] [--lengths 32768 131072] [--out results/]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

import kernels
from benchmarks.rank_processes import main, slowest
from kernels.attention.training.ring import zigzag_split

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels.collective.nccl import NCCLCommunicator

_HEADS, _KV_HEADS, _HEAD_DIM = 16, 8, 128
_COMPARED = 4096
_LENGTHS = [32768, 65536, 131072, 262144]


def _inputs(length: int, device: torch.device) -> list[Tensor]:
    """Return q, k, v and the gradient of the result of one sequence, the same on every rank."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(1, length, heads, _HEAD_DIM, device=device, generator=generator).bfloat16()
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS, _HEADS)
    ]


def _times(compute: Callable[..., Tensor], tensors: list[Tensor], repeats: int = 3) -> list[float]:
    """Return milliseconds of the forward and of the backward, the median of a few."""
    *leaves, dout = tensors
    leaves = [it.detach().requires_grad_() for it in leaves]
    found = []
    for _ in range(repeats + 1):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]  # of PyTorch
        marks[0].record()
        out = compute(*leaves)
        marks[1].record()
        torch.autograd.grad(out, leaves, dout)
        marks[2].record()
        torch.cuda.synchronize()
        found.append([marks[i].elapsed_time(marks[i + 1]) for i in range(2)])
    return [sorted(column)[repeats // 2] for column in zip(*found[1:], strict=True)]


def _check(communicator: NCCLCommunicator, device: torch.device) -> None:
    """Raise unless the result and the gradients of a short sequence are those of one GPU."""
    whole = [it.requires_grad_() for it in _inputs(_COMPARED, device)]
    results = []
    for split in (False, True):
        tensors = [
            zigzag_split(it.detach(), communicator.rank, communicator.size)
            if split
            else it.detach()
            for it in whole
        ]
        leaves = [it.requires_grad_() for it in tensors[:3]]
        compute: Callable[..., Tensor] = (
            kernels.ring_attention if split else kernels.flash_attention
        )
        out = compute(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, tensors[3])])
    for one, part in zip(*results, strict=True):
        expected = zigzag_split(one, communicator.rank, communicator.size)
        torch.testing.assert_close(part, expected, rtol=2e-2, atol=2e-2)


def measure(communicator: NCCLCommunicator, lengths: list[int]) -> list[dict[str, Any]]:
    """Check, then measure each length on all ranks together and on the first alone."""
    device = torch.device("cuda", communicator.rank)
    _check(communicator, device)
    rows = []
    for length in lengths:
        tensors = _inputs(length, device)
        row: dict[str, Any] = {"ranks": communicator.size, "length": length}
        if not communicator.rank:
            one = _times(kernels.flash_attention, tensors)
            row |= {"one_forward_ms": round(one[0], 2), "one_backward_ms": round(one[1], 2)}
        distributed.barrier()
        parts = [
            zigzag_split(it, communicator.rank, communicator.size).contiguous() for it in tensors
        ]
        ring = [slowest(communicator, it) for it in _times(kernels.ring_attention, parts)]
        rows.append(
            row | {"ring_forward_ms": round(ring[0], 2), "ring_backward_ms": round(ring[1], 2)}
        )
        if not communicator.rank:
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main("ring-attention", __doc__ or "", "lengths", _LENGTHS, measure)
