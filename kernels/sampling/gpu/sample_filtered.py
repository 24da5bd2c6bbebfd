"""A filtered row's draw: weighted selection on the order by likelihood, without sorting.

A row's tokens are ordered by key (`ordering_keys`: distance below the peak, then id), and every filter keeps the first
so many. So each of them, and the draw, asks for the first key whose cumulative amount exceeds a target: the count for
top_k, the weight for the others. It is found by dividing a window of keys, [low, high), into parts until it holds one
token: in the list of candidates where the window lies in there, else in the logits until it is small enough for a list.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sampling.gpu.sample_tiles import (
    COLUMNS,
    FILTERED,
    INVERSE_TEMPERATURE,
    SOURCE,
    TARGET,
    TOP_K,
    TOP_P,
    UNIFORM,
    drawn_amount,
    ordering_keys,
    weights_of,
)

_NOWHERE = tl.constexpr(0x7F800000)
"""Bits of an infinite distance."""
_WEIGHTLESS = tl.constexpr(0x41E00000)
"""Bits of 28: so far below the peak no token has a weight."""
_WIDE = tl.constexpr(256)
"""Units of a float32's last bit: a part of so many has another first and last distance, whatever is rounded."""


@triton.jit
def load_parts(
    logits, listed, start, size, IN_LIST: tl.constexpr, BLOCK: tl.constexpr, LOADS: tl.constexpr
):
    """Ask for LOADS parts of the listed candidates, or of the logits, before any of them is needed."""
    parts = ()
    for i in tl.static_range(LOADS):
        at = start + i * BLOCK + tl.arange(0, BLOCK)
        if IN_LIST:
            parts = parts + (tl.load(listed + at, mask=at < size, other=0),)  # type: ignore[assignment]
        else:
            part = tl.load(logits + at, mask=at < size, other=-float("inf"))
            parts = parts + (part,)  # type: ignore[assignment]
    return parts


@triton.jit
def keys_of(
    part,
    start,
    size,
    peak,
    scale,
    IN_LIST: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return keys and weights of a part that `load_parts` loaded."""
    at = start + tl.arange(0, BLOCK)
    if IN_LIST:
        nowhere = tl.full([BLOCK], _NOWHERE, tl.int64) << ID_BITS
        keys = tl.where(at < size, part, nowhere)
    else:
        keys = ordering_keys((peak - part.to(tl.float32)) * scale, at, ID_BITS)
    distances = (keys >> ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)
    return keys, weights_of(distances)


@triton.jit
def tighten(
    logits,
    listed,
    size,
    peak,
    scale,
    low,
    high,
    IN_LIST: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
):
    """Cut off what a window holds before its first token with a weight and behind its last."""
    least = tl.full([BLOCK], 0, tl.int64) + high
    most = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, size, BLOCK * LOADS):
        parts = load_parts(logits, listed, start, size, IN_LIST, BLOCK, LOADS)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(
                parts[i], start + i * BLOCK, size, peak, scale, IN_LIST, ID_BITS, BLOCK
            )
            inside = (keys >= low) & (keys < high) & (weights > 0)
            least = tl.minimum(least, tl.where(inside, keys, high))
            most = tl.maximum(most, tl.where(inside, keys, -1))
    return tl.min(least, 0), tl.max(most, 0) + 1


@triton.jit
def split(low, high, ID_BITS: tl.constexpr, WAYS: tl.constexpr):
    """Return the upper edges [WAYS] of a window's parts; the last is `high`.

    Distances are more even than the bits of floats are, so a window is divided by them while it is wide enough.
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
    logits,
    listed,
    size,
    peak,
    scale,
    counting,
    edges,
    IN_LIST: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Return the amounts and the numbers [WAYS] of the tokens with a weight below edges."""
    sums = tl.full([BLOCK, WAYS], 0, tl.int64)
    numbers = tl.full([BLOCK, WAYS], 0, tl.int32)
    for start in range(0, size, BLOCK * LOADS):
        parts = load_parts(logits, listed, start, size, IN_LIST, BLOCK, LOADS)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(
                parts[i], start + i * BLOCK, size, peak, scale, IN_LIST, ID_BITS, BLOCK
            )
            exists = weights > 0
            amounts = tl.where(counting, exists.to(tl.int64), weights)
            below = keys[:, None] < edges[None, :]
            sums += tl.where(below, amounts[:, None], 0)
            numbers += (below & exists[:, None]).to(tl.int32)
    return tl.sum(sums, 0), tl.sum(numbers, 0)


@triton.jit
def narrow(
    logits,
    listed,
    size,
    peak,
    scale,
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
    """Narrow a window around the first key whose cumulative amount exceeds `target`, to `enough` tokens at most.

    Amounts at `low` and `high` are those of all keys below. A list holds the keys from its window's `low` on, and
    logits have `size` tokens at most below `high`.
    """
    base = low_amount
    below = tl.full([], 0, tl.int32)
    up_to = below + size
    while up_to - below > enough:
        number = up_to - below
        edges = split(low, high, ID_BITS, WAYS)
        amounts, numbers = measure(
            logits, listed, size, peak, scale, counting, edges, IN_LIST, ID_BITS, BLOCK, LOADS, WAYS
        )
        amounts += base
        beyond = amounts > target
        low_amount = tl.maximum(low_amount, tl.max(tl.where(beyond, low_amount, amounts), 0))
        high_amount = tl.minimum(high_amount, tl.min(tl.where(beyond, amounts, high_amount), 0))
        below = tl.maximum(below, tl.max(tl.where(beyond, below, numbers), 0))
        up_to = tl.minimum(up_to, tl.min(tl.where(beyond, numbers, up_to), 0))
        low = tl.maximum(low, tl.max(tl.where(beyond, low, edges), 0))
        high = tl.min(tl.where(beyond, edges, high), 0)
        if 2 * (up_to - below) > number:
            # Most of the window is empty, and dividing that finds nothing.
            low, high = tighten(
                logits, listed, size, peak, scale, low, high, IN_LIST, ID_BITS, BLOCK, LOADS
            )
    return low, high, low_amount, high_amount


@triton.jit
def gather(
    logits,
    listed,
    low,
    high,
    size,
    peak,
    scale,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
):
    """List the tokens with a weight in [low, high); returns how many they are."""
    tl.debug_barrier()  # what was listed before has been read
    number = tl.full([], 0, tl.int32)
    for start in range(0, size, BLOCK * LOADS):
        parts = load_parts(logits, listed, start, size, False, BLOCK, LOADS)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(
                parts[i], start + i * BLOCK, size, peak, scale, False, ID_BITS, BLOCK
            )
            wanted = (keys >= low) & (keys < high) & (weights > 0)
            at = number + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(listed + at, keys, mask=wanted)
            number += tl.sum(wanted.to(tl.int32), 0)
    tl.debug_barrier()
    return number


@triton.jit
def weight_below(
    logits,
    listed,
    size,
    edge,
    peak,
    scale,
    IN_LIST: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
):
    """Return the weight of all keys below an edge."""
    sums = tl.full([BLOCK], 0, tl.int64)
    for start in range(0, size, BLOCK * LOADS):
        parts = load_parts(logits, listed, start, size, IN_LIST, BLOCK, LOADS)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(
                parts[i], start + i * BLOCK, size, peak, scale, IN_LIST, ID_BITS, BLOCK
            )
            sums += tl.where(keys < edge, weights, 0)
    return tl.sum(sums, 0)


@triton.jit
def find(
    logits,
    listed,
    size,
    peak,
    scale,
    target,
    counting,
    low,
    high,
    low_amount,
    high_amount,
    end,
    total,
    V: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
    WAYS: tl.constexpr,
    ROW_WAYS: tl.constexpr,
):
    """Find the first key whose cumulative amount exceeds `target`, first listing what is around it if that is not.

    Returns:
        The key, the next one, the amount below that, and the list's size and window.
    """
    if (target < low_amount) | (target >= high_amount):
        low, high, low_amount, high_amount = end * 0, end, end * 0, total
        # A loop that constants show is never entered stops Triton's compiler, which knows nothing of what is in there.
        if V > CAPACITY:
            low, high, low_amount, high_amount = narrow(
                logits, listed, V, peak, scale, target, counting, CAPACITY,
                low, high, low_amount, high_amount, False, ID_BITS, BLOCK, LOADS, ROW_WAYS,
            )  # fmt: skip
        size = gather(logits, listed, low, high, V, peak, scale, ID_BITS, BLOCK, LOADS)
    found, edge, _, reached = narrow(
        logits, listed, size, peak, scale, target, counting, 1,
        low, high, low_amount, high_amount, True, ID_BITS, BLOCK, 1, WAYS,
    )  # fmt: skip
    found, edge = tighten(logits, listed, size, peak, scale, found, edge, True, ID_BITS, BLOCK, 1)
    return found, edge, reached, size, low, high, low_amount, high_amount


@triton.jit
def draw_filtered(
    logits,
    table,
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
    """Apply top_k, top_p and min_p, each to what the one before has kept, and draw; program (row)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(kinds + row) != FILTERED:
        return
    entry = table + row * COLUMNS
    logits += tl.load(entry + SOURCE).to(tl.int64) * row_stride
    listed += row * CAPACITY
    scale = tl.load(entry + INVERSE_TEMPERATURE).to(tl.float32)
    top_k = tl.load(entry + TOP_K).to(tl.int64)
    top_p = tl.load(entry + TOP_P)
    peak = tl.load(peaks + row)
    candidates = tl.load(counts + row)
    tile = tl.arange(0, TILES)
    of_tiles = sums + row * 2 * NUM_TILES + tile
    total = tl.sum(tl.load(of_tiles, mask=tile < NUM_TILES, other=0), 0)
    near = tl.sum(tl.load(of_tiles + NUM_TILES, mask=tile < NUM_TILES, other=0), 0)

    # The list's window, and the amounts below its ends: counts at first, weights from the second stage on. A list that
    # overflowed holds nothing that can be relied on.
    first = tl.full([], 0, tl.int64)
    end = tl.full([], _WEIGHTLESS, tl.int64) << ID_BITS
    size = tl.where(candidates <= CAPACITY, candidates, 0)
    low, high, low_amount, high_amount = first, end, first, size.to(tl.int64)
    everything = tl.full([], V, tl.int64)

    kept = total
    found = first
    for stage in range(3):
        counting = stage == 0
        # Fewer candidates than top_k are all that have a weight.
        needed = (top_k > 0) & (top_k <= candidates)
        target = top_k - 1
        if stage == 1:
            mass = top_p * kept.to(tl.float64)
            cut = mass.to(tl.int64)
            target = cut + (cut.to(tl.float64) < mass).to(tl.int64) - 1
            kept = tl.minimum(kept, near)
            # A mass of 1 never cuts: rounding the total to a float must not drop a token.
            needed = (top_p < 1.0) & (target < kept)
        if stage == 2:
            target = drawn_amount(tl.load(entry + UNIFORM), kept)
            needed = kept > 0
        if needed:
            found, edge, reached, size, low, high, low_amount, high_amount = find(
                logits, listed, size, peak, scale, target, counting,
                low, high, low_amount, high_amount, end, tl.where(counting, everything, total),
                V, CAPACITY, ID_BITS, BLOCK, LOADS, WAYS, ROW_WAYS,
            )  # fmt: skip
            if stage == 0:
                # Those that tie with the last one are kept, and may lie outside of the window.
                edge = ((found >> ID_BITS) + 1) << ID_BITS
                if candidates <= CAPACITY:
                    kept = weight_below(
                        logits, listed, size, edge, peak, scale, True, ID_BITS, BLOCK, 1
                    )
                else:
                    kept = weight_below(
                        logits, listed, V, edge, peak, scale, False, ID_BITS, BLOCK, LOADS
                    )
            if stage == 1:
                kept = tl.minimum(kept, reached)
        if stage == 0:
            size = tl.where(candidates <= CAPACITY, size, 0)
            high_amount = weight_below(
                logits, listed, size, end, peak, scale, True, ID_BITS, BLOCK, 1
            )
            low_amount = first
    token = found & ((1 << ID_BITS) - 1)
    to = tl.load(entry + TARGET).to(tl.int64)
    tl.store(tokens + to, token)
    tl.store(checked + to, token)
