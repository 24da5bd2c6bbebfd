"""Samples a filtered row: the filters select tokens in the order of probability, without sorting.

The tokens of a row are ordered by key (`ordering_keys`: distance below the peak, then id), and every filter keeps a
prefix of that order. top_k and top_p thus look for the first key whose cumulative amount exceeds a target: the count of
tokens for top_k, their weight for top_p. It is found by dividing a window of keys, [low,
high), into parts until one token is left: in the list of candidates where the window lies within it, else in the logits
until the window is small enough for a list.

The functions take a tuple `row`: the row's logits as `load_logits` takes them, the list of candidates, the peak, and
the factor on distances.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.functions import LOWEST_KEY, ranked_id, ranking_keys
from kernels.sampling.gpu.noise import gumbel_noise, load_noise_key
from kernels.sampling.gpu.row_table import (
    COLUMNS,
    FILTERED,
    INVERSE_TEMPERATURE,
    MIN_P_DISTANCE,
    TARGET,
    TOP_K,
    TOP_P,
    apply_mask,
    load_logits,
    logits_of,
)
from kernels.sampling.gpu.sample_tiles import ordering_keys, weights_of

_NOWHERE = tl.constexpr(0x7F800000)
"""Bits of an infinite distance."""
_WEIGHTLESS = tl.constexpr(0x41E00000)
"""Bits of 28: at that distance below the peak no token has a weight."""
_WIDE = tl.constexpr(256)
"""Units of the last bit of a float32: the ends of a part of this many are distinct distances despite rounding."""

_EVERYTHING = tl.constexpr(2**62)
"""Above the amount of all tokens of a row."""


@triton.jit
def load_parts(row, start, size, IN_LIST: tl.constexpr, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    """Load LOADS parts of the listed candidates, or of the logits, before any of them is used."""
    logits, listed, _, _ = row
    parts = ()
    for i in tl.static_range(LOADS):
        at = start + i * BLOCK + tl.arange(0, BLOCK)
        if IN_LIST:
            parts = parts + (tl.load(listed + at, mask=at < size, other=0),)  # type: ignore[assignment]
        else:
            parts = parts + (load_logits(logits, at, size),)  # type: ignore[assignment]
    return parts


@triton.jit
def keys_of(
    row,
    part,
    start,
    size,
    IN_LIST: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return keys and weights of a part that `load_parts` loaded."""
    logits, _, peak, scale = row
    at = start + tl.arange(0, BLOCK)
    if IN_LIST:
        nowhere = tl.full([BLOCK], _NOWHERE, tl.int64) << ID_BITS
        keys = tl.where(at < size, part, nowhere)
    else:
        values = apply_mask(logits, part, start, size)
        keys = ordering_keys((peak - values) * scale, at, ID_BITS)
    distances = (keys >> ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)
    return keys, weights_of(distances)


@triton.jit
def tighten(
    row,
    size,
    low,
    high,
    IN_LIST: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
):
    """Shrink a window to the range from its first token with a weight to its last."""
    least = tl.full([BLOCK], 0, tl.int64) + high
    most = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, size, BLOCK * LOADS):
        parts = load_parts(row, start, size, IN_LIST, BLOCK, LOADS)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(row, parts[i], start + i * BLOCK, size, IN_LIST, ID_BITS, BLOCK)
            inside = (keys >= low) & (keys < high) & (weights > 0)
            least = tl.minimum(least, tl.where(inside, keys, high))
            most = tl.maximum(most, tl.where(inside, keys, -1))
    return tl.min(least, 0), tl.max(most, 0) + 1


@triton.jit
def split(low, high, ID_BITS: tl.constexpr, WAYS: tl.constexpr):
    """Return the upper edges [WAYS] of the parts of a window; the last is `high`.

    Tokens are spread more evenly over distances than over the bits of floats, so a wide window is divided by distance.
    """
    part = tl.arange(0, WAYS) + 1
    low_bits, high_bits = (low >> ID_BITS).to(tl.int32), (high >> ID_BITS).to(tl.int32)
    nearest = low_bits.to(tl.float32, bitcast=True)
    farthest = high_bits.to(tl.float32, bitcast=True)
    distances = nearest + (farthest - nearest) * (part.to(tl.float32) / WAYS)
    by_distance = distances.to(tl.int32, bitcast=True).to(tl.int64) << ID_BITS
    by_distance = tl.minimum(tl.maximum(by_distance, low), high)
    wide = high_bits - low_bits > _WIDE
    edges = tl.where(wide, by_distance, low + (high - low) * part // WAYS)
    return tl.where(part == WAYS, high, edges)


@triton.jit
def measure(
    row,
    size,
    counting,
    edges,
    IN_LIST: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Return the amounts and the numbers [WAYS] of the tokens with a weight below each edge."""
    sums = tl.full([BLOCK, WAYS], 0, tl.int64)
    numbers = tl.full([BLOCK, WAYS], 0, tl.int32)
    for start in range(0, size, BLOCK * LOADS):
        parts = load_parts(row, start, size, IN_LIST, BLOCK, LOADS)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(row, parts[i], start + i * BLOCK, size, IN_LIST, ID_BITS, BLOCK)
            exists = weights > 0
            amounts = tl.where(counting, exists.to(tl.int64), weights)
            below = keys[:, None] < edges[None, :]
            sums += tl.where(below, amounts[:, None], 0)
            numbers += (below & exists[:, None]).to(tl.int32)
    return tl.sum(sums, 0), tl.sum(numbers, 0)


@triton.jit
def narrow(
    row,
    size,
    target,
    counting,
    enough,
    low,
    high,
    low_amount,
    high_amount,
    IN_LIST: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Narrow a window around the first key whose cumulative amount exceeds `target` to at most `enough` tokens.

    The amounts at `low` and `high` are those of all keys below. A list holds the keys from the `low` of its window on;
    logits have at most `size` tokens below `high`.
    """
    base = low_amount
    below = tl.full([], 0, tl.int32)
    up_to = below + size
    while up_to - below > enough:
        number = up_to - below
        edges = split(low, high, ID_BITS, WAYS)
        amounts, numbers = measure(row, size, counting, edges, IN_LIST, ID_BITS, BLOCK, LOADS, WAYS)
        amounts += base
        beyond = amounts > target
        low_amount = tl.maximum(low_amount, tl.max(tl.where(beyond, low_amount, amounts), 0))
        high_amount = tl.minimum(high_amount, tl.min(tl.where(beyond, amounts, high_amount), 0))
        below = tl.maximum(below, tl.max(tl.where(beyond, below, numbers), 0))
        up_to = tl.minimum(up_to, tl.min(tl.where(beyond, numbers, up_to), 0))
        low = tl.maximum(low, tl.max(tl.where(beyond, low, edges), 0))
        high = tl.min(tl.where(beyond, edges, high), 0)
        if 2 * (up_to - below) > number:
            # Most of the window is empty: dividing it further finds nothing.
            low, high = tighten(row, size, low, high, IN_LIST, ID_BITS, BLOCK, LOADS)
    return low, high, low_amount, high_amount


@triton.jit
def gather(row, size, low, high, ID_BITS: tl.constexpr, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    """Write the tokens with a weight in [low, high) to the list; return their number."""
    _, listed, _, _ = row
    tl.debug_barrier()  # all threads have read the previous list
    number = tl.full([], 0, tl.int32)
    for start in range(0, size, BLOCK * LOADS):
        parts = load_parts(row, start, size, False, BLOCK, LOADS)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(row, parts[i], start + i * BLOCK, size, False, ID_BITS, BLOCK)
            wanted = (keys >= low) & (keys < high) & (weights > 0)
            at = number + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(listed + at, keys, mask=wanted)
            number += tl.sum(wanted.to(tl.int32), 0)
    tl.debug_barrier()
    return number


@triton.jit
def weight_below(
    row,
    size,
    edge,
    IN_LIST: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
):
    """Return the weight of all keys below an edge."""
    sums = tl.full([BLOCK], 0, tl.int64)
    for start in range(0, size, BLOCK * LOADS):
        parts = load_parts(row, start, size, IN_LIST, BLOCK, LOADS)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(row, parts[i], start + i * BLOCK, size, IN_LIST, ID_BITS, BLOCK)
            sums += tl.where(keys < edge, weights, 0)
    return tl.sum(sums, 0)


@triton.jit
def sample_below(
    row,
    noise_key,
    size,
    edge,
    IN_LIST: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
):
    """Return the id of the token with the largest sum of noise minus distance among all keys below an edge."""
    best = tl.full([BLOCK], LOWEST_KEY, tl.int64)
    for start in range(0, size, BLOCK * LOADS):
        parts = load_parts(row, start, size, IN_LIST, BLOCK, LOADS)
        for i in tl.static_range(LOADS):
            keys, _ = keys_of(row, parts[i], start + i * BLOCK, size, IN_LIST, ID_BITS, BLOCK)
            ids = (keys & ((1 << ID_BITS) - 1)).to(tl.int32)
            distances = (keys >> ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)
            totals = ranking_keys(gumbel_noise(noise_key, ids) - distances, ids)
            best = tl.maximum(best, tl.where(keys < edge, totals, LOWEST_KEY))
    return ranked_id(tl.max(best, 0))


@triton.jit
def find(
    row,
    size,
    target,
    counting,
    low,
    high,
    low_amount,
    high_amount,
    end,
    V: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
    WAYS: tl.constexpr,
    ROW_WAYS: tl.constexpr,
):
    """Find the first key whose cumulative amount exceeds `target`, after listing the keys around it where needed.

    Returns:
        The key, the next one, the amount below the next one, and the size and window of the list.
    """
    if (target < low_amount) | (target >= high_amount):
        low, high, low_amount, high_amount = end * 0, end, end * 0, _EVERYTHING + end * 0
        # Triton's compiler fails on a loop that it can prove is never entered.
        if V > CAPACITY:
            low, high, low_amount, high_amount = narrow(
                row, V, target, counting, CAPACITY,
                low, high, low_amount, high_amount, False, ID_BITS, BLOCK, LOADS, ROW_WAYS,
            )  # fmt: skip
        size = gather(row, V, low, high, ID_BITS, BLOCK, LOADS)
    found, edge, _, reached = narrow(
        row, size, target, counting, 1,
        low, high, low_amount, high_amount, True, ID_BITS, BLOCK, 1, WAYS,
    )  # fmt: skip
    found, edge = tighten(row, size, found, edge, True, ID_BITS, BLOCK, 1)
    return found, edge, reached, size, low, high, low_amount, high_amount


@triton.jit
def sample_filtered(
    logits,
    table,
    masks,
    kinds,
    peaks,
    counts,
    sums,
    listed,
    tokens,
    checked,
    row_stride,
    V: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
    WAYS: tl.constexpr,
    ROW_WAYS: tl.constexpr,
    ID_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Apply top_k, top_p and min_p, each to the tokens that the previous filter kept, and sample; program (row)."""
    number = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(kinds + number) != FILTERED:
        return
    entry = table + number * COLUMNS
    source = logits_of(logits, masks, entry, row_stride)
    scale = tl.load(entry + INVERSE_TEMPERATURE).to(tl.float32)
    row = (source, listed + number * CAPACITY, tl.load(peaks + number), scale)
    candidates = tl.load(counts + number)
    tile = tl.arange(0, TILES)
    of_tiles = sums + number * 2 * NUM_TILES + tile

    # The window of the list, and the amounts below its ends: counts at first, weights from the second stage on. A list
    # that overflowed is not used.
    first = tl.full([], 0, tl.int64)
    end = tl.full([], _WEIGHTLESS, tl.int64) << ID_BITS
    size = tl.where(candidates <= CAPACITY, candidates, 0)
    low, high, low_amount, high_amount = first, end, first, size.to(tl.int64)

    # Tokens whose keys are below `limit` are kept; their weight is at most `kept`.
    kept = tl.sum(tl.load(of_tiles, mask=tile < NUM_TILES, other=0), 0)
    limit = end
    listed_weight = first
    is_listed = candidates <= CAPACITY
    for stage in range(2):
        counting = stage == 0
        # Where there are fewer candidates than top_k, they are all tokens with a weight.
        top_k = tl.load(entry + TOP_K).to(tl.int32)
        needed = (top_k > 0) & (top_k <= candidates)
        target = top_k.to(tl.int64) - 1
        if stage == 1:
            top_p = tl.load(entry + TOP_P)
            mass = top_p * kept.to(tl.float64)
            cut = mass.to(tl.int64)
            target = cut + (cut.to(tl.float64) < mass).to(tl.int64) - 1
            near = tl.load(of_tiles + NUM_TILES, mask=tile < NUM_TILES, other=0)
            kept = tl.minimum(kept, tl.sum(near, 0))
            # A mass of 1 never cuts: rounding the total to a float must not drop a token.
            needed = (top_p < 1.0) & (target < kept)
            is_listed = is_listed & ((target < high_amount) | (needed == 0))
        if needed:
            found, edge, reached, size, low, high, low_amount, high_amount = find(
                row, size, target, counting,
                low, high, low_amount, high_amount, end,
                V, CAPACITY, ID_BITS, BLOCK, LOADS, WAYS, ROW_WAYS,
            )  # fmt: skip
            if stage == 0:
                # Tokens that tie with the last one are kept, and may lie outside of the window.
                edge = ((found >> ID_BITS) + 1) << ID_BITS
                if candidates <= CAPACITY:
                    kept = weight_below(row, size, edge, True, ID_BITS, BLOCK, 1)
                else:
                    kept = weight_below(row, V, edge, False, ID_BITS, BLOCK, LOADS)
            if stage == 1:
                kept = tl.minimum(kept, reached)
            limit = tl.minimum(limit, edge)
        if stage == 0:
            size = tl.where(candidates <= CAPACITY, size, 0)
            high_amount = weight_below(row, size, end, True, ID_BITS, BLOCK, 1)
            low_amount = first
            listed_weight = high_amount
    most = tl.load(entry + MIN_P_DISTANCE).to(tl.float32)
    beyond = (most.to(tl.int32, bitcast=True).to(tl.int64) + 1) << ID_BITS
    limit = tl.minimum(limit, beyond)
    noise_key = load_noise_key(entry)
    # The list of candidates is a prefix of the order, so it holds all kept tokens if it has their weight.
    if is_listed & (kept <= listed_weight):
        token = sample_below(row, noise_key, size, limit, True, ID_BITS, BLOCK, 1)
    else:
        token = sample_below(row, noise_key, V, limit, False, ID_BITS, BLOCK, LOADS)
    to = tl.load(entry + TARGET).to(tl.int64)
    tl.store(tokens + to, token)
    tl.store(checked + to, token)
