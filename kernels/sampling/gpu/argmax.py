"""The argmax of each row of logits in two launches: the best key of each tile, then the best of all tiles.

Each tile also writes the sum of its exponentials, from which the second launch computes the log-probability of a token.
Tiles are the same for all rows and their sums are added in a fixed order, so the bits of a row's result do not depend
on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch
from kernels.gpu.functions import (
    LOWEST_KEY,
    MINUS_INFINITY,
    exponentials,
    log_of_total,
    ranked_bits,
    ranked_id,
    ranked_is_finite,
    ranked_value,
    ranking_bits,
    ranking_keys,
)
from kernels.sampling.gpu.noise import gumbel_noise, load_noise_key
from kernels.sampling.gpu.row_table import (
    INVERSE_TEMPERATURE,
    KIND,
    UNFILTERED,
    apply_mask,
    load_logits,
    logits_of,
)

LOWEST_BITS = tl.constexpr(-(2**31))
"""Below the `ranking_bits` of every value; used where there is no value."""

TILE_WARPS = 8
_TILE = 8192
"""Logits per program: few enough that one row fills a GPU, enough that the reduction across threads is cheap."""


@triton.jit
def rank_tiles(
    logits, table, masks, best, noisy, groups, sums, row_stride,
    V: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the best key of a tile; program (tile, row).

    Args:
        table: [rows, COLUMNS] float64, the row table; unused where COLUMNS is 0, and rows are those of `logits`.
        masks: [masks, ceil(V / 32)] int32, the masks that the table refers to; unused where COLUMNS is 0.
        noisy: [rows, tiles] int64, written for unfiltered rows with the best key of scaled logits, less the largest of
            the tile, with noise; unused where COLUMNS is 0.
        groups: [rows, groups] int32, written with the largest bits of each group unless COLUMNS is 0.
        sums: [rows, tiles] float32, written with the sum of exp(logit - largest of the tile) where SUMS.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    group = tile * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # Ids from V on are the largest of the tile, so none of them is the first of the largest logits.
    if COLUMNS:
        source = logits_of(logits, masks, table + row * COLUMNS, row_stride)
        values = apply_mask(source, load_logits(source, ids, V), tile * BLOCK, V)
    else:
        at = logits + row * row_stride + ids
        values = tl.load(at, mask=ids < V, other=float("-inf")).to(tl.float32)
    bits = ranking_bits(values)
    of_groups = tl.max(bits, 1)
    largest = tl.max(of_groups, 0)
    first = tl.min(tl.min(tl.where(bits == largest, ids, 0x7FFFFFFF), 1), 0)
    key = (largest.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)
    place = row * tl.num_programs(0) + tile
    tl.store(best + place, key)
    if SUMS:
        total = tl.sum(tl.sum(tl.exp(values - ranked_value(largest)), 1), 0)
        tl.store(sums + place, tl.where(largest > MINUS_INFINITY, total, 0.0))
    if COLUMNS:
        num_groups = (V + GROUP - 1) // GROUP
        tl.store(groups + row * num_groups + group, of_groups, mask=group < num_groups)
        entry = table + row * COLUMNS
        if tl.load(entry + KIND).to(tl.int32) == UNFILTERED:
            # The row's largest logit is not known yet. `set_limits` adds the distances of the tiles' largest.
            scale = tl.load(entry + INVERSE_TEMPERATURE).to(tl.float32)
            noise = gumbel_noise(load_noise_key(entry), ids)
            totals = noise - (ranked_value(largest) - values) * scale
            winner = tl.max(tl.max(ranking_keys(totals, ids), 1), 0)
            # Infinities of the same sign have no difference. The row fails where the largest is positive or NaN.
            tl.store(noisy + place, tl.where(ranked_is_finite(key), winner, LOWEST_KEY))


@triton.jit
def best_key(best, row, NUM_TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the best of a row's keys."""
    tile = tl.arange(0, BLOCK)
    keys = tl.load(best + row * NUM_TILES + tile, mask=tile < NUM_TILES, other=LOWEST_KEY)
    return tl.max(keys, 0)


@triton.jit
def merge_tiles(best, sums, row, NUM_TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the best of a row's keys, and the sum of exp(logit - largest) of the row."""
    tile = tl.arange(0, BLOCK)
    exists = tile < NUM_TILES
    keys = tl.load(best + row * NUM_TILES + tile, mask=exists, other=LOWEST_KEY)
    of_tiles = tl.load(sums + row * NUM_TILES + tile, mask=exists, other=0.0)
    key = tl.max(keys, 0)
    return key, tl.sum(of_tiles * exponentials(ranked_bits(keys), ranked_bits(key)), 0)


@triton.jit
def choose_best(
    best, sums, tokens, checked, logprobs,
    NUM_TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the argmax of a row and its log-probability; program (row)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key, total = merge_tiles(best, sums, row, NUM_TILES, BLOCK)
    tl.store(tokens + row, ranked_id(key))
    tl.store(checked + row, tl.where(ranked_is_finite(key), ranked_id(key), -1))
    tl.store(logprobs + row, 0.0 - log_of_total(total))


@triton.jit
def score_chosen(
    logits, best, sums, tokens, logprobs, row_stride,
    NUM_TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the log-probability of a given token of a row; program (row)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key, total = merge_tiles(best, sums, row, NUM_TILES, BLOCK)
    logit = tl.load(logits + row * row_stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(logprobs + row, logit - ranked_value(ranked_bits(key)) - log_of_total(total))


def argmax_tokens(
    logits: Tensor,
    tokens: Tensor,
    checked: Tensor,
    logprobs: Tensor,
    *,
    pdl: bool = False,
    tile: int = _TILE,
) -> None:
    """Compute the argmax of each row, the smallest id among equals; NaN counts as the largest.

    Args:
        logits: [R, V], float32, bfloat16 or float16, contiguous in V. Not changed.
        tokens: [R] int64 contiguous, written; valid ids whatever the logits.
        checked: [R] int64 contiguous, written; the same, but -1 where the largest logit is not finite.
        logprobs: [R] float32 contiguous, written; their log-probabilities, arbitrary where `checked` is -1.
        pdl: use programmatic dependent launch.
        tile: logits per program, a power of two.
    """
    best, sums = _rank(logits, pdl=pdl, tile=tile)
    choose_best[(len(logits),)](
        best, sums, tokens, checked, logprobs,
        NUM_TILES=best.shape[1], BLOCK=triton.next_power_of_2(best.shape[1]), num_warps=1, **dependent_launch(pdl),
    )  # fmt: skip


def chosen_logprobs(
    logits: Tensor, tokens: Tensor, logprobs: Tensor, *, pdl: bool = False, tile: int = _TILE
) -> None:
    """Compute the log-probability of one token of each row.

    Args:
        logits: as for `argmax_tokens`.
        tokens: [R] int64 contiguous, in [0, V).
        logprobs: [R] float32 contiguous, written; arbitrary where the row's largest logit is not finite.
        pdl: use programmatic dependent launch.
        tile: logits per program, a power of two.
    """
    best, sums = _rank(logits, pdl=pdl, tile=tile)
    score_chosen[(len(logits),)](
        logits, best, sums, tokens, logprobs, logits.stride(0),
        NUM_TILES=best.shape[1], BLOCK=triton.next_power_of_2(best.shape[1]), num_warps=1, **dependent_launch(pdl),
    )  # fmt: skip


def _rank(logits: Tensor, *, pdl: bool, tile: int) -> tuple[Tensor, Tensor]:
    """Return the best key of each tile and its sum, [R, tiles] each."""
    rows, size = logits.shape
    tiles = triton.cdiv(size, tile)
    best = torch.empty((rows, tiles), dtype=torch.int64, device=logits.device)
    sums = torch.empty((rows, tiles), dtype=torch.float32, device=logits.device)
    rank_tiles[(tiles, rows)](
        logits, best, best, best, best, best, sums, logits.stride(0),
        V=size, BLOCK=tile, GROUP=tile, COLUMNS=0, SUMS=True, num_warps=TILE_WARPS,
        **dependent_launch(pdl),
    )  # fmt: skip
    return best, sums
