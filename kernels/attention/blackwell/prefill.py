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

from kernels.attention.blackwell.load import load_items
from kernels.attention.blackwell.multiply import multiply_items
from kernels.attention.blackwell.pipeline import OUT_COLUMNS, ROWS, Constants, make_pipeline
from kernels.attention.blackwell.softmax import soften_items
from kernels.attention.hopper.prefill import HopperPrefill

if TYPE_CHECKING:
    from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch
    from kernels.attention.select import Selection


@gluon.jit(do_not_specialize=["num_entries", "late_heads", "num_items", "table_stride", "window"])
def prefill(
    q_desc, k_desc, v_desc, o_desc, out, lse, tiles, block_table, counter, table_stride, num_entries,
    late_heads, num_items, k_head_stride, scale, window, softcap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, KEY_SHARES: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
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


class BlackwellPrefill(HopperPrefill):
    """Prefill attention of one step on Blackwell; shapes as in `kernels.prefill_attention`."""

    _BOX = ROWS.value, OUT_COLUMNS.value

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        super().__init__(problem, batch, selection)
        del self._constants["OWN_OUTPUT"]  # it is in tensor memory

    def _kernel(self) -> Any:  # noqa: ANN401 - of Triton
        return prefill
