"""x"""
from __future__ import annotations
import math
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.hopper.backward_roles import consume, produce
from kernels.attention.hopper.backward_tiles import BackwardConstants, make_buffers, tile_of_program


@gluon.jit(do_not_specialize=["window"])
def backward(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, scale, scale_log2, window,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV and add to the scratch memory of dQ; program (tile of keys, key-value head, sequence)."""
    c = BackwardConstants(HEADS, GROUP, D, BLOCK_M, BLOCK_N, STAGES, CAUSAL, WINDOW)
    buffers = make_buffers(q_desc.dtype, c)
    tile = tile_of_program(cu_seqlens_q, cu_seqlens_k, c)
    gl.warp_specialize([
        (consume, (buffers, tile, dq, dk, dv, scale_log2, scale, window, c)),
        (produce, (buffers, tile, q_desc, k_desc, v_desc, do_desc, stats_desc, window, c)),
    ], [1], [24])  # fmt: skip
