"""The argmax of each row from the keys that the programs of the LM head wrote, and its log-probability."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch
from kernels.gpu.functions import (
    LOWEST_KEY,
    exponentials,
    log_of_total,
    ranked_bits,
    ranked_id,
    ranked_is_finite,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.sampling.tile_best import TileBest

_BLOCK = 4096


@triton.jit
def best_of_tiles(
    best, totals, ids, tokens, logprobs, num_tiles, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Reduce the keys and totals of one row; program (row)."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    keys = tl.full([BLOCK], LOWEST_KEY, tl.int64)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        place = row.to(tl.int64) * num_tiles + tile
        more = tl.load(best + place, mask=tile < num_tiles, other=LOWEST_KEY)
        added = tl.load(totals + place, mask=tile < num_tiles, other=0.0)
        largest = tl.maximum(keys, more)
        bits = ranked_bits(largest)
        sums = sums * exponentials(ranked_bits(keys), bits)
        sums += added * exponentials(ranked_bits(more), bits)
        keys = largest
    key = tl.max(keys, 0)
    total = tl.sum(sums * exponentials(ranked_bits(keys), ranked_bits(key)), 0)
    chosen = ranked_id(key)
    tl.store(ids + row, chosen)
    tl.store(tokens + row, tl.where(ranked_is_finite(key), chosen, -1))
    tl.store(logprobs + row, 0.0 - log_of_total(total))


def best_tokens(
    best: TileBest, ids: Tensor, tokens: Tensor, logprobs: Tensor, *, pdl: bool = False
) -> None:
    """Compute the argmax of each row, the smallest id among equals.

    Args:
        best: from a linear layer.
        ids: [rows] int64 contiguous, written; may be the input of the next step.
        tokens: [rows] int64 contiguous, written; the ids, but -1 where the largest logit is not finite or any is NaN.
        logprobs: [rows] float32 contiguous, written; natural log-probabilities, arbitrary where `tokens` is -1.
        pdl: use programmatic dependent launch.
    """
    rows, tiles = best.keys.shape
    block = min(_BLOCK, triton.next_power_of_2(tiles))
    best_of_tiles[(rows,)](
        best.keys, best.totals, ids, tokens, logprobs, tiles,
        BLOCK=block, num_warps=min(8, max(1, block // 256)), **dependent_launch(pdl),
    )  # fmt: skip
