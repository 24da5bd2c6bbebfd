"""Attention for training in Triton, forward and backward, for every GPU with tensor cores.

    forward     a program for (tile of queries, head, sequence)
    delta       rowsum(dO * O), which all weights of a row have in common in the backward
    backward    dK, dV: a program for (tile of keys, key-value head, sequence), over all queries of its group's heads
                dQ: a program for (tile of queries, head, sequence)

The weights are computed again from the log-sum-exps. No sum crosses programs, so there are no atomic additions, and
every run has the same bits.

Source: Dao, "FlashAttention-2", 2023, algorithms 1 and 2.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from torch import Tensor

from kernels.arch import HOPPER, GPUArch, detect
from kernels.attention.training.philox import drop_below
from kernels.attention.training.portable.backward import backward_keys, backward_queries, delta
from kernels.attention.training.portable.forward import forward

if TYPE_CHECKING:
    from kernels.attention.training.registry import Grads, Saved, TrainingBatch, TrainingProblem


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingLaunch:
    """Tile sizes of one kernel.

    Attributes:
        block_m: queries of a tile.
        block_n: keys of a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def within(self, mask_tile: tuple[int, int]) -> TrainingLaunch:
        """Return the launch with tiles that divide those of a block mask; (0, 0) for none."""
        block_m, block_n = (
            math.gcd(own, of_mask) if of_mask else own
            for own, of_mask in zip((self.block_m, self.block_n), mask_tile, strict=True)
        )
        return dataclasses.replace(self, block_m=block_m, block_n=block_n)


Launches = tuple[TrainingLaunch, TrainingLaunch, TrainingLaunch]
"""Of the forward, of the gradients of keys and values, and of that of queries; none is measured yet."""

_L: Final = TrainingLaunch
_HALF: Final[dict[int, Launches]] = {
    64: (_L(128, 64, 8, 2), _L(64, 64, 8, 2), _L(64, 64, 4, 2)),
    128: (_L(128, 32, 8, 2), _L(64, 64, 8, 2), _L(64, 64, 8, 2)),
    256: (_L(64, 32, 8, 1), _L(32, 32, 8, 1), _L(32, 32, 4, 1)),
}
_HOPPER: Final[dict[int, Launches]] = {
    64: (_L(128, 64, 8, 3), _L(32, 128, 4, 3), _L(128, 64, 8, 3)),
    128: (_L(128, 128, 8, 3), _L(64, 128, 8, 3), _L(128, 64, 8, 3)),
    256: (_L(64, 64, 8, 1), _L(32, 32, 4, 1), _L(32, 32, 4, 1)),
}
_SINGLE: Final[dict[int, Launches]] = {
    64: (_L(32, 32, 4, 1), _L(16, 32, 4, 1), _L(32, 16, 4, 1)),
    128: (_L(32, 16, 8, 1), _L(16, 16, 8, 1), _L(16, 16, 8, 1)),
    256: (_L(16, 16, 8, 1), _L(16, 16, 8, 1), _L(16, 16, 8, 1)),
}
"""For float32."""
_DELTA_ROWS: Final = 64


def training_launches(arch: GPUArch, head_dim: int, dtype: torch.dtype) -> Launches:
    """Return the launches for a head dim of at most 256."""
    table = _HALF if arch.unsupported(HOPPER, "wgmma is Hopper's") else _HOPPER
    if dtype is torch.float32:
        table = _SINGLE
    return next(launches for size, launches in table.items() if head_dim <= size)


class PortableTraining:
    """See `kernels.attention.training.registry.TrainingKernel`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: TrainingBatch, problem: TrainingProblem
    ) -> tuple[Tensor, Tensor]:
        """See `TrainingKernel.forward`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        launch = _launches(q, problem)[0]
        grid = (-(-problem.max_seqlen_q // launch.block_m), q.shape[1], len(batch.cu_seqlens_q) - 1)
        if all(grid):
            forward[grid](
                q, k, v, out, lse, *_batch_arguments(batch, by_key=False), *_strides(q, k, v),
                *_numbers(problem), **_constants(q, k, batch, problem, launch),
            )  # fmt: skip
        return out, lse

    def backward(
        self, grads: Grads, saved: Saved, batch: TrainingBatch, problem: TrainingProblem
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `TrainingKernel.backward`."""
        (dout, dlse), (q, k, v, out, lse) = grads, saved
        dq, dk, dv = (torch.empty(it.shape, dtype=it.dtype, device=it.device) for it in (q, k, v))
        means = torch.empty_like(lse)
        count, heads, size = q.shape
        _, keys, queries = _launches(q, problem)
        if count:
            delta[(-(-count // _DELTA_ROWS), heads)](
                out, dout, dlse, means, count, dout.stride(0), dout.stride(1),
                HEADS=heads, HEAD_DIM=size, BLOCK_D=_padded(size), BLOCK_M=_DELTA_ROWS,
            )  # fmt: skip
        num_seqs = len(batch.cu_seqlens_q) - 1
        strides = _strides(q, k, v, dout)
        for kernel, launch, results, tiles in (
            (backward_keys, keys, (dk, dv), -(-problem.max_seqlen_k // keys.block_n)),
            (backward_queries, queries, (dq,), -(-problem.max_seqlen_q // queries.block_m)),
        ):
            by_key = kernel is backward_keys
            grid = (tiles, k.shape[1] if by_key else heads, num_seqs)
            if all(grid):
                kernel[grid](
                    q, k, v, dout, lse, means, *results, *_batch_arguments(batch, by_key=by_key), *strides,
                    *_numbers(problem), **_constants(q, k, batch, problem, launch),
                )  # fmt: skip
        return dq, dk, dv


PORTABLE: Final = PortableTraining()


def _launches(q: Tensor, problem: TrainingProblem) -> tuple[TrainingLaunch, ...]:
    """Return the launches of the forward, of dK and dV, and of dQ; their tiles divide those of the block mask."""
    launches = training_launches(detect(q.device), q.shape[-1], q.dtype)
    return tuple(launch.within(problem.mask_tile) for launch in launches)


def _padded(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for it in tensors for stride in it.stride()[:2])


def _batch_arguments(batch: TrainingBatch, *, by_key: bool) -> tuple[Tensor, ...]:
    slopes = batch.cu_seqlens_q if batch.alibi_slopes is None else batch.alibi_slopes
    mask = (batch.cu_seqlens_q, batch.cu_seqlens_q)
    if batch.mask is not None:
        mask = batch.mask[2:] if by_key else batch.mask[:2]
    return (batch.cu_seqlens_q, batch.cu_seqlens_k, slopes, *mask)


def _numbers(problem: TrainingProblem) -> tuple[float, ...]:
    """Return scale, softcap, window, and the seed, threshold and factor of the dropout."""
    return (
        problem.softmax_scale,
        problem.softcap or 0.0,
        problem.sliding_window or 0,
        problem.dropout_seed,
        drop_below(problem.dropout_p),
        1 / (1 - problem.dropout_p),
    )


def _constants(
    q: Tensor, k: Tensor, batch: TrainingBatch, problem: TrainingProblem, launch: TrainingLaunch
) -> dict[str, Any]:
    heads, size = q.shape[1:]
    mask_q, mask_k = problem.mask_tile if batch.mask is not None else (0, 0)
    return {
        "HEADS": heads,
        "GROUP": heads // k.shape[1],
        "HEAD_DIM": size,
        "BLOCK_D": _padded(size),
        "CAUSAL": problem.causal,
        "WINDOW": problem.sliding_window is not None,
        "SOFTCAP": problem.softcap is not None,
        "ALIBI": batch.alibi_slopes is not None,
        "DROPOUT": problem.dropout_p > 0,
        "MASK_Q": mask_q,
        "MASK_K": mask_k,
        # TF32 would lose half the digits of float32.
        "PRECISION": "ieee" if q.dtype is torch.float32 else None,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }
