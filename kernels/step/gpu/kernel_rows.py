"""A decode step of 1, 2, 4 or 8 rows as a single launch, with the same bits for a row however many there are.

The programs, their tiles and their barriers are those of `kernels.step.gpu.kernel`. Weights are read once for all rows.
Several rows may be of one sequence: its next token and those that were proposed to follow it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.consumer_rows import consume_rows
from kernels.step.gpu.kernel import BoundStep
from kernels.step.gpu.producer import produce_rows
from kernels.step.gpu.ring import make_ring
from kernels.step.gpu.step_constants import StepConstants

if TYPE_CHECKING:
    from torch import Tensor


@gluon.jit(do_not_specialize=["columns"])
def step_of_rows(
    table, embedding, norm, head, ids, positions, earlier, slots, block_table, columns, cos, sin, hidden, between,
    qkv, inner, parts, logs, mixed, best, totals, counters, logits, tokens, logprobs, sampled, sampled_rows, eps, scale,
    LAYERS: gl.constexpr, HIDDEN: gl.constexpr, INNER: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP_SPLITS: gl.constexpr, HELD: gl.constexpr, HELD_P: gl.constexpr, D: gl.constexpr, DP: gl.constexpr,
    BLOCK_D: gl.constexpr, INPUTS: gl.constexpr, VOCAB: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
    FLYING: gl.constexpr, HEAD_FLYING: gl.constexpr, EARLY: gl.constexpr, SPLITS: gl.constexpr, NORMS: gl.constexpr,
    BIAS: gl.constexpr, WINDOWS: gl.constexpr, FP8: gl.constexpr, HIDDEN_TILES: gl.constexpr, BATCH: gl.constexpr,
    LOCAL: gl.constexpr, FP8_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Compute a step with one program per SM; all programs must be resident at once, else they deadlock.

    Args:
        table: as in `kernels.step.gpu.kernel.whole_step`, as are `eps` and `scale`.
        ids: as in `RowsKernel`, as are `positions`, `earlier`, `slots`, `block_table`, `cos`, `sin`, `logits`,
            `tokens`, `logprobs`, `sampled` and `sampled_rows`.
        columns: of `block_table`.
        hidden: [2, BATCH, HIDDEN], the hidden states after a layer.
        between: [2, BATCH, HIDDEN], the hidden states between attention and MLP.
        qkv: [2, BATCH, (HEADS + 2 * KV_HEADS) * D].
        inner: [2, BATCH, INNER].
        parts: [2, SPLITS, BATCH, HEADS, D] in the model's dtype.
        logs: [2, SPLITS, BATCH, HEADS] float32.
        mixed: [2, BATCH, HEADS * D], the merged splits; not used if BATCH is 1.
        best: [BATCH, MOST_PROGRAMS] int64, the largest key of a program's logits.
        totals: [BATCH, MOST_PROGRAMS] float32, the sum of their exp(logit - largest).
        counters: as in `whole_step`.
    """
    c = StepConstants(
        LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, GROUP_SPLITS, HELD, HELD_P, D, DP, BLOCK_D, INPUTS, VOCAB, BLOCK_SIZE,
        STAGES, FLYING, HEAD_FLYING, EARLY, SPLITS, NORMS, BIAS, WINDOWS, FP8, HIDDEN_TILES, BATCH, FP8_WEIGHTS,
        OF_ROWS=True, LOCAL=LOCAL,
    )  # fmt: skip
    ring = make_ring(embedding.dtype.element_ty, c)
    buffers = (hidden, between, qkv, inner, parts, logs, mixed, best, totals)
    gl.warp_specialize([
        (consume_rows, (
            ring, table, embedding, norm, ids, positions, earlier, slots, cos, sin, buffers, counters, logits, tokens,
            logprobs, sampled, sampled_rows, eps, scale, c,
        )),
        (produce_rows, (ring, table, head, positions, earlier, block_table, columns, c)),
    ], [4], [64])  # fmt: skip


class RowsKernel(BoundStep):
    """The decode steps of B rows; arguments as for `BoundStep`."""

    of_rows = True

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        earlier: Tensor,
        slots: Tensor,
        block_table: Tensor,
        rope: tuple[Tensor, Tensor],
        logits: Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        sampled: Tensor,
        sampled_rows: Tensor,
    ) -> None:
        """Write the tokens' keys and values to the cache, and compute the logits and their argmax.

        Args:
            ids: [B] int64, the tokens; -1 - i selects `sampled[i]`.
            positions: [B] int64, their positions; all before them are in the cache or are those of the rows before.
            earlier: [B] int32, how many of the rows right before are of the same sequence, at consecutive positions.
            slots: [B] int32, the cache slots of their keys and values; -1 writes none.
            block_table: [B, columns] int32 contiguous, blocks of the positions before them.
            rope: cos and sin of all positions, [positions, 1, D] contiguous each, as `rope_tables` returns them.
            logits: [B, V] contiguous; written.
            tokens: [B] int64; written, the argmax of the logits, -1 where the largest logit is not finite.
            logprobs: [B] float32; written, natural log-probabilities, undefined where `tokens` is -1.
            sampled: [capacity] int64; written at `sampled_rows`, as `tokens` but always a valid id.
            sampled_rows: [B] int64; may repeat.
        """
        weights = self._weights
        step_of_rows[self._grid](
            self._table, weights.embedding, weights.norm, weights.head, ids, positions, earlier, slots, block_table,
            block_table.shape[1], *rope, *self._buffers, logits, tokens, logprobs, sampled, sampled_rows,
            weights.shape.eps, weights.shape.softmax_scale * math.log2(math.e),
            FP8_WEIGHTS=weights.layers[0].qkv.scale is not None, **self._constants,
        )  # fmt: skip
