"""Warp-specialized prefill attention on Hopper's FP8 tensor cores, over an FP8 cache.

    tiles         one pass over queries, and over the cache: tiles with one scale each (`tiles`)
    producer      one warp that issues TMA copies of the tiles, a few stages ahead (`producer`)
    consumers     warp groups that compute attention for 64 query rows each (`consumer`)

Input and output are half precision; docs/decisions/0014-fp8-prefill.md reports the error. The warp roles and the work
list are those of `prefill`. This module launches the kernel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.hopper.fp8.consumer import consume
from kernels.attention.hopper.fp8.producer import produce
from kernels.attention.hopper.fp8.tiles import (
    KeyTiles,
    Operands,
    make_operands,
    plan_key_tiles,
    write_queries,
    write_tiles,
)
from kernels.attention.hopper.pipeline import ROWS, Constants, make_pipeline
from kernels.attention.hopper.prefill import WorkList, attends_nothing, bulk_strides, plan_work
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch
from kernels.attention.splits import split_sequences

if TYPE_CHECKING:
    from kernels.attention.select import Selection


@gluon.jit(do_not_specialize=["num_entries", "late_heads", "num_items", "num_tiles", "num_scales"])
def prefill(
    q_desc, k_desc, v_desc, o_desc, out, lse, q_factors, scales, tiles, first_tiles, counter, num_tiles,
    num_scales, num_entries, late_heads, num_items,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Process all items; one program per SM. Shapes as in `kernels.prefill_attention`."""
    # Each tile of keys is contiguous. Window and softcap are unsupported.
    c = Constants(
        HEADS, GROUP, 1, D, 1, BLOCK_N, BLOCK_M, BLOCK_N, STAGES, False, CAUSAL, False, False, LSE, True, 1
    )  # fmt: skip
    pipe = make_pipeline(q_desc.dtype, o_desc.dtype, c)
    supply = (
        pipe, q_desc, k_desc, v_desc, tiles, first_tiles, num_tiles, counter, num_entries,
        late_heads, num_items, c,
    )  # fmt: skip
    # Registers per thread (setmaxnreg): 64 Ki per SM divided over the warp groups, in steps of 8.
    gl.warp_specialize([
        (consume, (pipe, o_desc, out, lse, q_factors, scales, num_scales, gl.constexpr(0), c)),
        (consume, (pipe, o_desc, out, lse, q_factors, scales, num_scales, gl.constexpr(1), c)),
        (produce, supply),
    ], [4, 1], [240, 24])  # fmt: skip


class HopperFP8Prefill:
    """Prefill attention of one step in FP8 on Hopper, over an FP8 cache; shapes as in `kernels.prefill_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PagedBatch), "its row takes no packed keys"
        launch = selection.launch_for(batch.max_seqlen_k, batch.num_seqs)
        group = problem.group_size
        self._problem = problem
        self._parts = [
            (
                part,
                plan_key_tiles(part, launch.block_n),
                plan_work(problem, part, group, launch.block_m, selection.arch.num_sms),
            )
            for part in split_sequences(problem, batch, torch.float8_e4m3fn.itemsize)
        ]
        self._operands: Operands | None = None
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

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write the attention of `q` over `kv` to `out`.

        Raises:
            ShapeError: the output's address or stride is not a multiple of 16 bytes.
        """
        assert kv_scale is not None, "check_scale raises for a float8 cache without scales"
        if attends_nothing(q, kv, out, lse):
            return
        if self._operands is None:
            most = max(len(tiles.tiles) for _, tiles, _ in self._parts)
            size = self._constants["BLOCK_N"]
            self._operands = make_operands(q, self._problem.num_kv_heads, most, size)
        write_queries(q, self._operands, self._problem.softmax_scale * math.log2(math.e))
        for part, tiles, work in self._parts:
            write_tiles(kv, kv_scale, part, tiles, self._operands)
            self._attend(self._operands, tiles, work, out, lse)

    def _attend(
        self, operands: Operands, tiles: KeyTiles, work: WorkList, out: Tensor, lse: Tensor | None
    ) -> None:
        out_strides = [*bulk_strides("out", out, out.stride()[:2]), 1]
        q, k, v = operands.q, operands.k.flatten(0, 2), operands.v.flatten(0, 2)
        num_tiles = operands.k.shape[1]
        prefill[work.grid](
            TensorDescriptor(q, list(q.shape), list(q.stride()), *self._boxes["q"]),
            TensorDescriptor(k, list(k.shape), list(k.stride()), *self._boxes["k"]),
            TensorDescriptor(v, list(v.shape), list(v.stride()), *self._boxes["v"]),
            TensorDescriptor(out, list(out.shape), out_strides, *self._boxes["o"]), out,
            out if lse is None else lse, operands.factors, operands.scales, work.items.tiles,
            tiles.first_tiles, work.counter, num_tiles, self._problem.num_kv_heads * num_tiles,
            work.items.num_entries, work.items.late_heads, work.num_items,
            **self._constants,
        )  # fmt: skip
