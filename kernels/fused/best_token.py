"""The second half of a greedy choice: the largest of the keys that the LM head's programs left behind.

Knows keys and ids, nothing of logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.fused.dependent import dependent_launch
from kernels.fused.device import LOWEST_KEY, ranked_id, ranked_is_finite

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 4096


@triton.jit
def best_of_tiles(best, ids, tokens, num_tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Reduce the keys of one row; program (row)."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    keys = tl.full([BLOCK], LOWEST_KEY, tl.int64)
    for start in range(0, num_tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        place = best + row.to(tl.int64) * num_tiles + tile
        keys = tl.maximum(keys, tl.load(place, mask=tile < num_tiles, other=LOWEST_KEY))
    key = tl.max(keys, 0)
    chosen = ranked_id(key)
    tl.store(ids + row, chosen)
    tl.store(tokens + row, tl.where(ranked_is_finite(key), chosen, -1))


def best_tokens(best: Tensor, ids: Tensor, tokens: Tensor, *, pdl: bool = False) -> None:
    """Choose the most likely token of each row, the smallest id among equals.

    Args:
        best: [rows, tiles] int64 contiguous, from a linear layer with `best`.
        ids: [rows] int64 contiguous; may be the next step's input.
        tokens: [rows] int64 contiguous; the ids, and -1 where the largest logit is no finite number, as where any
            is NaN.
        pdl: launch before the kernel before has ended.
    """
    rows, tiles = best.shape
    block = min(_BLOCK, triton.next_power_of_2(tiles))
    best_of_tiles[(rows,)](
        best,
        ids,
        tokens,
        tiles,
        BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
        **dependent_launch(pdl),
    )
