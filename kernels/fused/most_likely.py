"""The most likely token of each row of logits, in two launches: the best of each tile, then the best of all.

Maxima and nothing else, so neither the other rows nor the number of programs can change a bit. Knows no sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.draw_rows import DRAW_SIZES, DrawSizes
from kernels.fused.dependent import dependent_launch
from kernels.fused.device import LOWEST_KEY, ranked_id, ranked_is_finite, ranking_bits

if TYPE_CHECKING:
    from torch import Tensor

LOWEST_BITS = tl.constexpr(-(2**31))
"""Below the `ranking_bits` of every value: what stands for none."""

TILE_WARPS = 8


@triton.jit
def rank_tiles(
    logits,
    table,
    best,
    groups,
    row_stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Leave the best key of a tile and the largest bits of each of its groups; program (tile, row)."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = row
    if COLUMNS:
        source = tl.load(table + row * COLUMNS).to(tl.int64)
    group = tile * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(logits + source * row_stride + ids, mask=ids < V, other=0.0).to(tl.float32)
    bits = tl.where(ids < V, ranking_bits(values), LOWEST_BITS)
    of_groups = tl.max(bits, 1)
    largest = tl.max(of_groups, 0)
    first = tl.min(tl.min(tl.where(bits == largest, ids, 0x7FFFFFFF), 1), 0)
    key = (largest.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)
    tl.store(best + row * tl.num_programs(0) + tile, key)
    if COLUMNS:
        num_groups = (V + GROUP - 1) // GROUP
        tl.store(groups + row * num_groups + group, of_groups, mask=group < num_groups)


@triton.jit
def best_key(best, row, NUM_TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the best of a row's keys."""
    tile = tl.arange(0, BLOCK)
    keys = tl.load(best + row * NUM_TILES + tile, mask=tile < NUM_TILES, other=LOWEST_KEY)
    return tl.max(keys, 0)


@triton.jit
def choose_best(
    best, tokens, checked, NUM_TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Tell the most likely token of a row; program (row)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key = best_key(best, row, NUM_TILES, BLOCK)
    tl.store(tokens + row, ranked_id(key))
    tl.store(checked + row, tl.where(ranked_is_finite(key), ranked_id(key), -1))


def most_likely_tokens(
    logits: Tensor,
    tokens: Tensor,
    checked: Tensor,
    *,
    pdl: bool = False,
    sizes: DrawSizes = DRAW_SIZES,
) -> None:
    """Choose the most likely token of each row, the smallest id among equals; NaN counts as the largest.

    Args:
        logits: [R, V], float32, bfloat16 or float16, contiguous in V. Not changed.
        tokens: [R] int64 contiguous; valid ids, whatever the logits.
        checked: [R] int64 contiguous; the same, but -1 where the largest logit is no finite number.
        pdl: launch before the kernel before has ended.
        sizes: `tile` and `group` of them.
    """
    rows, size = logits.shape
    tiles = triton.cdiv(size, sizes.tile)
    best = torch.empty((rows, tiles), dtype=torch.int64, device=logits.device)
    launch = dependent_launch(pdl)
    rank_tiles[(tiles, rows)](
        logits,
        best,
        best,
        best,
        logits.stride(0),
        V=size,
        BLOCK=sizes.tile,
        GROUP=sizes.group,
        COLUMNS=0,
        num_warps=TILE_WARPS,
        **launch,
    )
    choose_best[(rows,)](
        best,
        tokens,
        checked,
        NUM_TILES=tiles,
        BLOCK=triton.next_power_of_2(tiles),
        num_warps=1,
        **launch,
    )
