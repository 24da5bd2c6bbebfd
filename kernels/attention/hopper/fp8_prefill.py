"""Warp-specialized prefill attention on Hopper's FP8 tensor cores.

    quantize      one pass over queries, keys and values (`fp8_quantize`)
    producer      one warp that issues TMA copies of the quantized tiles, a few stages ahead (`fp8_producer`)
    consumers     warp groups that compute attention for 64 query rows each (`fp8_consumer`)

Input and output are half precision; docs/decisions/0014-fp8-prefill.md reports the error. The warp roles and the work
list are those of `prefill`. This module launches the kernel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.hopper.fp8_consumer import consume
from kernels.attention.hopper.fp8_producer import produce
from kernels.attention.hopper.fp8_quantize import (
    KeyBlocks,
    Quantized,
    make_buffers,
    plan_key_blocks,
    quantize,
)
from kernels.attention.hopper.pipeline import ROWS, Constants, make_pipeline
from kernels.attention.hopper.prefill import attends_nothing, bulk_strides, plan_work
from kernels.attention.problem import PackedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.problem import AttentionProblem, PagedBatch
    from kernels.attention.select import Selection


@gluon.jit(do_not_specialize=["num_entries", "late_heads", "num_items", "num_blocks", "num_scales"])
def prefill(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    out,
    lse,
    q_factors,
    scales,
    tiles,
    first_blocks,
    counter,
    num_blocks,
    num_scales,
    num_entries,
    late_heads,
    num_items,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
):
    """Process all items; one program per SM. Shapes as in `kernels.prefill_attention`."""
    # Keys are packed, in blocks of one tile. Window and softcap are unsupported.
    c = Constants(
        HEADS, GROUP, 1, D, 1, BLOCK_N, BLOCK_M, BLOCK_N, STAGES, False, CAUSAL, False, False, LSE, True, 1
    )  # fmt: skip
    pipe = make_pipeline(q_desc.dtype, o_desc.dtype, c)
    supply = (
        pipe, q_desc, k_desc, v_desc, tiles, first_blocks, num_blocks, counter, num_entries,
        late_heads, num_items, c,
    )  # fmt: skip
    # Registers per thread (setmaxnreg): 64 Ki per SM divided over the warp groups, in steps of 8.
    gl.warp_specialize([
        (consume, (pipe, o_desc, out, lse, q_factors, scales, num_scales, gl.constexpr(0), c)),
        (consume, (pipe, o_desc, out, lse, q_factors, scales, num_scales, gl.constexpr(1), c)),
        (produce, supply),
    ], [4, 1], [240, 24])  # fmt: skip


class HopperFP8Prefill:
    """Prefill attention of one step in FP8 on Hopper, over packed keys; shapes as in `kernels.prefill_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PackedBatch), "its row takes no cache"
        launch = selection.launch_for(batch.max_seqlen_k, batch.num_seqs)
        group = problem.group_size
        self._problem = problem
        self._batch = batch
        self._work = plan_work(problem, batch, group, launch.block_m, selection.arch.num_sms)
        self._block_n = launch.block_n
        self._num_keys = 0
        self._buffers: tuple[KeyBlocks, Quantized] | None = None
        boxes = {
            "q": ([ROWS.value // group, group, problem.head_dim], gl.float8e4nv),
            "k": ([launch.block_n, problem.head_dim], gl.float8e4nv),
            "v": ([problem.head_dim, launch.block_n], gl.float8e4nv),
            "o": ([ROWS.value // group, group, problem.head_dim], getattr(gl, problem.dtype)),
        }
        self._boxes = {
            name: (box, gl.NVMMASharedLayout.get_default_for(box, dtype))
            for name, (box, dtype) in boxes.items()
        }
        self._constants: dict[str, Any] = {
            "HEADS": problem.num_heads,
            "GROUP": group,
            "D": problem.head_dim,
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.block_n,
            "STAGES": launch.num_stages,
            "CAUSAL": problem.causal,
            "LSE": problem.lse,
            "num_warps": 4,
        }

    def __call__(self, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Write the attention of `q` over `kv` to `out`.

        Raises:
            ShapeError: the output's address or stride is not a multiple of 16 bytes.
        """
        if attends_nothing(q, kv, out, lse):
            return
        keys, buffers = self.quantize(q, kv)
        self.attend(keys, buffers, out, lse)

    def quantize(self, q: Tensor, kv: Tensor) -> tuple[KeyBlocks, Quantized]:
        """Quantize one layer's queries, keys and values into buffers that all layers share."""
        if self._buffers is None or self._num_keys != kv.shape[1]:
            self._num_keys = kv.shape[1]
            keys = plan_key_blocks(self._batch.cu_seqlens_k, self._num_keys, self._block_n)
            self._buffers = keys, make_buffers(q, kv, keys)
        factor = self._problem.softmax_scale * math.log2(math.e)
        quantize(q, kv, *self._buffers, factor)
        return self._buffers

    def attend(
        self, keys: KeyBlocks, buffers: Quantized, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Compute attention of the operands that `quantize` returned; other arguments as in `__call__`."""
        out_strides = [*bulk_strides("out", out, out.stride()[:2]), 1]
        k, v = buffers.k.flatten(0, 2), buffers.v.flatten(0, 2)
        num_blocks = keys.blocks.shape[0]
        work = self._work
        prefill[work.grid](
            TensorDescriptor(
                buffers.q, list(buffers.q.shape), list(buffers.q.stride()), *self._boxes["q"]
            ),
            TensorDescriptor(k, list(k.shape), list(k.stride()), *self._boxes["k"]),
            TensorDescriptor(v, list(v.shape), list(v.stride()), *self._boxes["v"]),
            TensorDescriptor(out, list(out.shape), out_strides, *self._boxes["o"]),
            out,
            out if lse is None else lse,
            buffers.factors,
            buffers.scales,
            work.items.tiles,
            keys.first_blocks,
            work.counter,
            num_blocks,
            self._problem.num_kv_heads * num_blocks,
            work.items.num_entries,
            work.items.late_heads,
            work.num_items,
            **self._constants,
        )
