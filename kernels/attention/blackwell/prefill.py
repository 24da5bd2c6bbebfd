"""Warp-specialized prefill attention for Blackwell's data-centre GPUs in Gluon. No GPU has run it yet.

    loading warp        fetches the next work item and issues TMA copies of its queries, keys and values (`load`)
    multiplying warp    issues the tcgen05 products, whose results stay in tensor memory (`multiply`)
    softmax groups      two warp groups of 128 query rows each turn scores into weights, in place; the exponentials of
                        one overlap the products of the other (`softmax`)

Items, their order and the way that query heads share tiles are those of the Hopper kernel. This module launches the
kernel; `pipeline` defines the state that the warp roles share.

Source: Zadouri et al., "FlashAttention-4", 2026, for the roles, the weights over the scores, the conditional rescaling
and the exponentials by polynomial.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.blackwell.load import load_items
from kernels.attention.blackwell.multiply import multiply_items
from kernels.attention.blackwell.pipeline import OUT_COLUMNS, ROWS, Constants, make_pipeline
from kernels.attention.blackwell.softmax import soften_items
from kernels.attention.hopper.pipeline import heads_of_tile, rows_of_token
from kernels.attention.hopper.prefill import (
    attends_nothing,
    bulk_strides,
    describe_cache,
    exponents,
    plan_work,
)
from kernels.attention.portable.tile import window_argument

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch
    from kernels.attention.select import Selection


@gluon.jit(do_not_specialize=["num_entries", "late_heads", "num_items", "table_stride", "window"])
def prefill(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    out,
    lse,
    tiles,
    block_table,
    counter,
    table_stride,
    num_entries,
    late_heads,
    num_items,
    k_head_stride,
    scale,
    window,
    softcap,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    KEY_SHARES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    LSE: gl.constexpr,
):
    """Process all items; one program per SM.

    Shapes as in `kernels.prefill_attention`; the other arguments as in `hopper.prefill.prefill`.
    """
    c = Constants(
        HEADS, GROUP, KEY_SHARES, HEAD_DIM, BLOCK_SIZE, PAGE, BLOCK_M, BLOCK_N, STAGES, PAGED, CAUSAL, WINDOW,
        SOFTCAP, LSE,
    )  # fmt: skip
    pipe = make_pipeline(q_desc.dtype, c)
    # Registers per thread (setmaxnreg): 64 Ki per SM divided over three warp groups, the last of them half unused.
    gl.warp_specialize([
        (soften_items, (pipe, o_desc, out, lse, scale, window, softcap, gl.constexpr(0), c)),
        (soften_items, (pipe, o_desc, out, lse, scale, window, softcap, gl.constexpr(1), c)),
        (multiply_items, (pipe, window, c)),
        (load_items, (
            pipe, q_desc, k_desc, v_desc, tiles, block_table, table_stride, counter, num_entries,
            late_heads, num_items, k_head_stride, window, c,
        )),
    ], [4, 1, 1], [224, 56, 56])  # fmt: skip


class BlackwellPrefill:
    """Prefill attention of one step on Blackwell; shapes as in `kernels.prefill_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        launch = selection.launch_for(batch.max_seqlen_k, batch.num_seqs)
        group = heads_of_tile(problem.group_size)
        box = rows_of_token(group)
        self._problem = problem
        self._work = plan_work(problem, batch, group, launch.block_m, selection.arch.num_sms)
        self._scale, self._softcap = exponents(problem)
        dtype = getattr(gl, problem.dtype)
        page = min(problem.block_size or launch.block_n, launch.block_n)
        q_box = [ROWS.value // box, box, problem.head_dim]
        k_box = [page, problem.head_dim]
        o_box = [ROWS.value // box, box, OUT_COLUMNS.value]
        self._q_box = q_box, gl.NVMMASharedLayout.get_default_for(q_box, dtype)
        self._k_box = k_box, gl.NVMMASharedLayout.get_default_for(k_box, dtype)
        self._o_box = o_box, gl.NVMMASharedLayout.get_default_for(o_box, dtype)
        self._constants: dict[str, Any] = {
            "HEADS": problem.num_heads,
            "GROUP": group,
            "KEY_SHARES": problem.group_size // group,
            "HEAD_DIM": problem.head_dim,
            "BLOCK_SIZE": problem.block_size or 1,
            "PAGE": page,
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.block_n,
            "STAGES": launch.num_stages,
            "PAGED": problem.block_size is not None,
            "CAUSAL": problem.causal,
            "WINDOW": problem.sliding_window is not None,
            "SOFTCAP": problem.softcap is not None,
            "LSE": problem.lse,
            "num_warps": launch.num_warps,
        }

    def __call__(self, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Write the attention of `q` over `kv` to `out`.

        Raises:
            ShapeError: an address or a stride is not a multiple of 16 bytes, or the key-value heads are
                too far apart.
        """
        if attends_nothing(q, kv, out, lse):
            return
        cache = describe_cache(kv)
        rows, strides = [cache.num_rows, cache.width], [cache.token_stride, 1]
        q_strides = [*bulk_strides("q", q, q.stride()[:2]), 1]
        out_strides = [*bulk_strides("out", out, out.stride()[:2]), 1]
        work = self._work
        prefill[work.grid](
            TensorDescriptor(q, list(q.shape), q_strides, *self._q_box),
            TensorDescriptor(cache.keys, rows, strides, *self._k_box),
            TensorDescriptor(cache.values, rows, strides, *self._k_box),
            TensorDescriptor(out, list(out.shape), out_strides, *self._o_box),
            out,
            out if lse is None else lse,
            work.items.tiles,
            work.items.table,
            work.counter,
            work.items.table.stride(0),
            work.items.num_entries,
            work.items.late_heads,
            work.num_items,
            cache.head_stride,
            self._scale,
            window_argument(self._problem),
            self._softcap,
            **self._constants,
        )
