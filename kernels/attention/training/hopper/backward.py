"""One-pass backward of attention for Hopper in Gluon: fast, but with other bits in every run.

    prepare     rowsum(dO * O) of each query, and zeros as the sums of its gradient (`backward_scratch`)
    backward    a thread block for (tile of keys, key-value head, sequence), over the queries of its group's heads that
                see some of the keys: a warp copies tiles, two warp groups compute (`backward_roles`)
    finish      gradient of the queries from the sums

The weights are computed once, so there are 5 products where two passes have 7, but the gradient of a query is a sum
over thread blocks: they add to it in float32, in any order. Gradients of keys and values are the same in every run.

Source: Dao, "FlashAttention-2", 2023, algorithm 2; Shah et al., "FlashAttention-3", 2024, for the roles and the tiles.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.training.hopper.backward_roles import consume, produce
from kernels.attention.training.hopper.backward_scratch import finish, prepare
from kernels.attention.training.hopper.backward_tiles import (
    STATS,
    STATS_LAYOUT,
    WARPS,
    BackwardConstants,
    make_buffers,
)
from kernels.attention.training.hopper.forward import HopperTraining, aligned
from kernels.attention.training.portable.launch import PORTABLE
from kernels.attention.training.registry import (
    A_MILLISECOND,
    Grads,
    Saved,
    TrainingBatch,
    TrainingProblem,
)

BLOCK_M: Final = 64
"""Queries of a tile: as many as fit in registers beside the gradients of 128 keys and values."""
BLOCK_N: Final = 128
"""Keys of a tile: 64 for each warp group."""
STAGES: Final = 3
"""Tiles of queries in shared memory."""
_PRODUCER_REGISTERS: Final = gl.constexpr(24)
"""Of a thread (setmaxnreg); the consumers have 240."""


@gluon.jit(do_not_specialize=["window"])
def backward(
    q_desc, k_desc, v_desc, do_desc, stats_desc, sums, dk, dv, cu_seqlens_q, cu_seqlens_k, scale, scale_log2, window,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Write dK and dV, and add to the sums of dQ; program (tile of keys, key-value head, sequence)."""
    c = BackwardConstants(HEADS, GROUP, D, BLOCK_M, BLOCK_N, STAGES, CAUSAL, WINDOW)
    buffers = make_buffers(q_desc.dtype, c)
    gl.warp_specialize([
        (consume, (buffers, cu_seqlens_q, cu_seqlens_k, sums, dk, dv, scale_log2, scale, window, c)),
        (produce, (buffers, cu_seqlens_q, cu_seqlens_k, q_desc, k_desc, v_desc, do_desc, stats_desc, window, c)),
    ], [1], [_PRODUCER_REGISTERS])  # fmt: skip


class OnePassTraining(HopperTraining):
    """See `kernels.attention.training.registry.TrainingKernel`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: TrainingBatch, problem: TrainingProblem
    ) -> tuple[Tensor, Tensor]:
        """See `TrainingKernel.forward`."""
        if problem.num_operations(q) < A_MILLISECOND:
            return PORTABLE.forward(q, k, v, batch, problem)
        return super().forward(q, k, v, batch, problem)

    def backward(
        self, grads: Grads, saved: Saved, batch: TrainingBatch, problem: TrainingProblem
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `TrainingKernel.backward`."""
        (dout, dlse), (q, k, v, out, lse) = grads, saved
        dq, dk, dv = (torch.empty(it.shape, dtype=it.dtype, device=it.device) for it in (q, k, v))
        if not q.numel() or not k.numel():
            return dq.zero_(), dk.zero_(), dv.zero_()
        q, k, v, dout = map(aligned, (q, k, v, dout))
        (count, heads, size), num_seqs = q.shape, len(batch.cu_seqlens_q) - 1
        entries = (count // BLOCK_M + num_seqs) * heads
        stats, sums = (
            torch.empty(entries * numbers, dtype=torch.float32, device=q.device)
            for numbers in (STATS.value * BLOCK_M, BLOCK_M * size)
        )
        shape = {"HEADS": heads, "D": size, "BLOCK_M": BLOCK_M}
        by_query = (heads, -(-problem.max_seqlen_q // BLOCK_M), num_seqs)
        prepare[by_query](
            out, dout, lse, dlse, stats, sums, batch.cu_seqlens_q, dout.stride(0), dout.stride(1), **shape
        )  # fmt: skip
        # A wider window has no effect, and its sum with a position might not fit in 32 bits.
        window = min(problem.sliding_window or 0, problem.max_seqlen_k)
        numbers = STATS.value * BLOCK_M
        stats_desc = TensorDescriptor(stats, [len(stats)], [1], [numbers], STATS_LAYOUT.value)
        backward[(-(-problem.max_seqlen_k // BLOCK_N), k.shape[1], num_seqs)](
            _describe(q, BLOCK_M), _describe(k, BLOCK_N), _describe(v, BLOCK_N), _describe(dout, BLOCK_M), stats_desc,
            sums, dk, dv, batch.cu_seqlens_q, batch.cu_seqlens_k, problem.softmax_scale,
            problem.softmax_scale * math.log2(math.e), window, **shape,
            GROUP=heads // k.shape[1], BLOCK_N=BLOCK_N, STAGES=STAGES, CAUSAL=problem.causal,
            WINDOW=problem.sliding_window is not None, num_warps=WARPS.value,
        )  # fmt: skip
        finish[by_query](sums, dq, batch.cu_seqlens_q, problem.softmax_scale, **shape)
        return dq, dk, dv


ONE_PASS: Final = OnePassTraining()


def _describe(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe the tiles of `rows` tokens of a head of [T, H, D] for TMA."""
    box = [rows, 1, x.shape[2]]
    layout = gl.NVMMASharedLayout.get_default_for(
        box, getattr(gl, str(x.dtype).removeprefix("torch."))
    )
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)
