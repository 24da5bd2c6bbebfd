"""The tokens of unfiltered rows, and for filtered rows the weights, their sums by tile, and the candidates.

Weights are integers, so a sum does not depend on the order of the additions. The list of candidates has no order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.functions import (
    LOWEST_KEY,
    MINUS_INFINITY,
    ranked_bits,
    ranked_id,
    ranked_is_finite,
    ranked_value,
    ranking_keys,
)
from kernels.sampling.gpu.argmax import LOWEST_BITS, best_key
from kernels.sampling.gpu.row_table import (
    COLUMNS,
    FILTERED,
    GREEDY,
    INVERSE_TEMPERATURE,
    KIND,
    LEAST,
    MIN_P_DISTANCE,
    REACH,
    TARGET,
    TOP_K,
    UNFILTERED,
    WEIGHT_SCALE,
    apply_mask,
    load_logits,
    logits_of,
)


@triton.jit
def weights_of(distances):
    """Return the weights, int64, of scaled logits by their distances, float32 >= 0, from the largest."""
    return (tl.exp(-distances) * WEIGHT_SCALE).to(tl.int64)


@triton.jit
def set_limits(
    table, best, noisy, groups, kinds, peaks, limits, counts, tokens, checked,
    NUM_TILES: tl.constexpr, TILES: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the token of a row, or the largest distance of its candidates from its peak; program (row).

    The argmax is the result of rows that are greedy or have no finite peak, and that of logits with noise the result of
    unfiltered rows. The tokens of filtered rows are overwritten by `sample_filtered`.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key = best_key(best, row, NUM_TILES, TILES)
    finite = ranked_is_finite(key)
    entry = table + row * COLUMNS
    target = tl.load(entry + TARGET).to(tl.int64)
    kind = tl.where(finite, tl.load(entry + KIND).to(tl.int32), GREEDY)
    peak = ranked_value(ranked_bits(key))
    token = ranked_id(key)
    if kind == UNFILTERED:
        tile = tl.arange(0, TILES)
        place = row * NUM_TILES + tile
        of_tiles = tl.load(best + place, mask=tile < NUM_TILES, other=LOWEST_KEY)
        winners = tl.load(noisy + place, mask=tile < NUM_TILES, other=LOWEST_KEY)
        # Tiles of minus infinity and places past the last tile have no winner.
        exists = ranked_is_finite(winners)
        peaks_of_tiles = ranked_value(tl.where(exists, ranked_bits(of_tiles), ranked_bits(key)))
        scale = tl.load(entry + INVERSE_TEMPERATURE).to(tl.float32)
        totals = ranked_value(tl.where(exists, ranked_bits(winners), MINUS_INFINITY))
        totals -= (peak - peaks_of_tiles) * scale
        token = ranked_id(tl.max(ranking_keys(totals, ranked_id(winners)), 0))
    tl.store(tokens + target, token)
    tl.store(checked + target, tl.where(finite, token, -1))
    tl.store(kinds + row, kind)
    tl.store(peaks + row, peak)
    tl.store(counts + row, 0)
    if kind == FILTERED:
        reach = tl.load(entry + REACH).to(tl.int32)
        limit = tl.full([], float("inf"), tl.float32)
        if reach > 0:
            group = tl.arange(0, GROUPS)
            place = groups + row * NUM_GROUPS + group
            # The upper half of the bits is enough for a bound, and takes half of the time.
            highs = tl.load(place, mask=group < NUM_GROUPS, other=LOWEST_BITS) >> 16
            level = tl.full([], -(2**15), tl.int32)
            for step in range(16):
                higher = level + (1 << (15 - step))
                enough = tl.sum((highs >= higher).to(tl.int32), 0) >= reach
                level = tl.where(enough, higher, level)
            least = ranked_value(level << 16)
            scale = tl.load(entry + INVERSE_TEMPERATURE).to(tl.float32)
            # Bits below those of -inf are not those of a number.
            limit = tl.where(least > -float("inf"), (peak - least) * scale, limit)
        if tl.load(entry + TOP_K) == 0.0:
            limit = tl.minimum(limit, tl.load(entry + MIN_P_DISTANCE).to(tl.float32))
        tl.store(limits + row, limit)


@triton.jit
def weigh_tiles(
    logits, table, masks, kinds, peaks, limits, counts, sums, listed, row_stride,
    V: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, ID_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum the weights of a tile, all and those that min_p keeps, and list its candidates; program (tile, row).

    Only filtered rows need them.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # All loads are issued before the first result is used: most rows need them.
    kind = tl.load(kinds + row)
    entry = table + row * COLUMNS
    scale = tl.load(entry + INVERSE_TEMPERATURE).to(tl.float32)
    most = tl.load(entry + MIN_P_DISTANCE).to(tl.float32)
    peak = tl.load(peaks + row)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    source = logits_of(logits, masks, entry, row_stride)
    values = load_logits(source, ids, V)
    if kind != FILTERED:
        return
    distances = (peak - apply_mask(source, values, tile * BLOCK, V)) * scale
    weights = weights_of(distances)
    of_tile = sums + row * 2 * tl.num_programs(0) + tile
    total = tl.sum(weights, 0)
    tl.store(of_tile, total)
    near = total
    if most < float("inf"):
        near = tl.sum(tl.where(distances <= most, weights, 0), 0)
    tl.store(of_tile + tl.num_programs(0), near)
    least = tl.load(entry + LEAST).to(tl.int64)
    wanted = (weights >= least) & (distances <= tl.load(limits + row))
    number = tl.sum(wanted.to(tl.int32), 0)
    if number > 0:
        before = tl.atomic_add(counts + row, number, sem="relaxed")
        at = before + tl.cumsum(wanted.to(tl.int32), 0) - 1
        keys = ordering_keys(distances, ids, ID_BITS)
        tl.store(listed + row * CAPACITY + at, keys, mask=wanted & (at < CAPACITY))


@triton.jit
def ordering_keys(distances, ids, ID_BITS: tl.constexpr):
    """Return int64 keys, all distinct, that order by distance, float32 >= 0, then by id."""
    return (distances.to(tl.int32, bitcast=True).to(tl.int64) << ID_BITS) | ids.to(tl.int64)
