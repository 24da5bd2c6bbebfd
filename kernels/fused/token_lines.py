"""Attention of one token in lines of threads: each line treats one key at a time and knows nothing of the others.

Everything is of the shape [LINES, HALF], the halves of heads, so that nothing but sums over a line is exchanged
between threads until the lines are merged. What a line knows, its state, are four tuples over the query heads: the
halves of its output, its maximum and its sum. Knows nothing of launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.tile import LOG2_E, tanh
from kernels.fused.device import normalise_halves, rotate_halves


@triton.jit
def load_tile(
    k_base,
    v_base,
    table,
    start,
    first,
    end,
    row,
    column,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Load a tile of keys and values from `start` on, those from `first` on and before `end`.

    Returns:
        Tuples of DEPTH halves [LINES, HALF]: keys' first, their second, values' first, their second; 0 where there
        are none.
    """
    k_1 = ()
    k_2 = ()
    v_1 = ()
    v_2 = ()
    for i in tl.static_range(DEPTH):
        key = start + i * LINES + row
        exists = (key >= first) & (key < end)
        block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0, cache_modifier=".cg")
        place = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * STRIDE + column
        exists = exists & (column < D // 2)
        # Nothing of these is read again before the next step.
        k_1 = k_1 + (tl.load(k_base + place, mask=exists, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
        place_2 = place + D // 2
        k_2 = k_2 + (tl.load(k_base + place_2, mask=exists, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
        v_1 = v_1 + (tl.load(v_base + place, mask=exists, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
        v_2 = v_2 + (tl.load(v_base + place_2, mask=exists, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
    return k_1, k_2, v_1, v_2


@triton.jit
def prepare(first, second, gains, cosine, sine, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Normalise and rotate a head of the new token, in halves, rounded as `rotate_and_write` rounds."""
    wide_1 = first.to(tl.float32)
    wide_2 = second.to(tl.float32)
    if NORM:
        gain_1 = gains[0].to(tl.float32)
        gain_2 = gains[1].to(tl.float32)
        wide_1, wide_2 = normalise_halves(wide_1, wide_2, gain_1, gain_2, eps, D, first.dtype)
    wide_1, wide_2 = rotate_halves(wide_1, wide_2, cosine, sine)
    return wide_1.to(first.dtype), wide_2.to(first.dtype)


@triton.jit
def prepare_all(
    firsts, seconds, gains, cosine, sine, eps, GROUP: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Prepare the query heads of a group; returns tuples of their halves, float32."""
    q_1 = ()
    q_2 = ()
    for g in tl.static_range(GROUP):
        first, second = prepare(firsts[g], seconds[g], gains, cosine, sine, eps, D, NORM)
        q_1 = q_1 + (first.to(tl.float32),)  # type: ignore[assignment]
        q_2 = q_2 + (second.to(tl.float32),)  # type: ignore[assignment]
    return q_1, q_2


@triton.jit
def start_state(GROUP: tl.constexpr, LINES: tl.constexpr, HALF: tl.constexpr):
    """Return what each line knows of each query head before it saw a key: output in halves, maximum, sum."""
    acc = ()
    maxima = ()
    sums = ()
    for _ in tl.static_range(GROUP):
        acc = acc + (tl.zeros([LINES, HALF], tl.float32),)  # type: ignore[assignment]
        maxima = maxima + (tl.full([LINES], -float("inf"), tl.float32),)  # type: ignore[assignment]
        sums = sums + (tl.zeros([LINES], tl.float32),)  # type: ignore[assignment]
    return acc, acc, maxima, sums


@triton.jit
def score(q_1, q_2, k_1, k_2, seen, scale, softcap, SOFTCAP: tl.constexpr):
    """Score each line's key for one query head, [LINES] in units of log2; -inf where it is not seen."""
    products = q_1 * k_1.to(tl.float32) + q_2 * k_2.to(tl.float32)
    scores = tl.sum(products, 1) * scale
    if SOFTCAP:
        scores = tanh(scores / softcap) * softcap
    return tl.where(seen, scores * LOG2_E, -float("inf"))


@triton.jit
def attend_tile(
    state,
    q,
    tile,
    start,
    first_key,
    end,
    scale,
    softcap,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attend to a tile of keys from `start` on: those from `first_key` on and before `end`."""
    acc_1 = ()
    acc_2 = ()
    maxima = ()
    sums = ()
    line = tl.arange(0, LINES)
    for g in tl.static_range(GROUP):
        top = state[2][g]
        scores = ()
        for i in tl.static_range(DEPTH):
            key = start + i * LINES + line
            seen = (key >= first_key) & (key < end)
            found = score(q[0][g], q[1][g], tile[0][i], tile[1][i], seen, scale, softcap, SOFTCAP)
            top = tl.maximum(top, found)
            scores = scores + (found,)  # type: ignore[assignment]
        # A line that has seen nothing yet has the maximum -inf, and -inf - -inf is not a number.
        base = tl.where(top == -float("inf"), 0.0, top)
        fade = tl.exp2(state[2][g] - base)
        total = state[3][g] * fade
        first = state[0][g] * fade[:, None]
        second = state[1][g] * fade[:, None]
        for i in tl.static_range(DEPTH):
            share = tl.exp2(scores[i] - base)
            total += share
            first += share[:, None] * tile[2][i].to(tl.float32)
            second += share[:, None] * tile[3][i].to(tl.float32)
        acc_1 = acc_1 + (first,)  # type: ignore[assignment]
        acc_2 = acc_2 + (second,)  # type: ignore[assignment]
        maxima = maxima + (top,)  # type: ignore[assignment]
        sums = sums + (total,)  # type: ignore[assignment]
    return acc_1, acc_2, maxima, sums


@triton.jit
def attend_new(
    state,
    q,
    k_1,
    k_2,
    v_1,
    v_2,
    sees,
    scale,
    softcap,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attend to the new token, whose key and value all lines hold, in the lines that see it, [LINES, 1]: the first.

    `state` has seen nothing yet.
    """
    acc_1 = ()
    acc_2 = ()
    maxima = ()
    sums = ()
    seen = tl.sum(sees.to(tl.int32), 1) > 0
    first = tl.where(sees, v_1.to(tl.float32), 0.0)
    second = tl.where(sees, v_2.to(tl.float32), 0.0)
    for g in tl.static_range(GROUP):
        found = score(q[0][g], q[1][g], k_1, k_2, seen, scale, softcap, SOFTCAP)
        acc_1 = acc_1 + (state[0][g] + first,)  # type: ignore[assignment]
        acc_2 = acc_2 + (state[1][g] + second,)  # type: ignore[assignment]
        maxima = maxima + (found,)  # type: ignore[assignment]
        sums = sums + (tl.where(seen, 1.0, 0.0),)  # type: ignore[assignment]
    return acc_1, acc_2, maxima, sums


@triton.jit
def merge_lines(first, second, maxima, sums):
    """Merge the lines of one query head; returns its output in halves, and the log of its sum in units of log2."""
    top = tl.max(maxima, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp2(maxima - base)
    total = tl.sum(sums * weight, 0)
    saw_nothing = total == 0.0
    total = tl.where(saw_nothing, 1.0, total)
    inverse = tl.where(saw_nothing, 0.0, 1.0 / total)
    log_sum = tl.where(saw_nothing, -float("inf"), base + tl.log2(total))
    first, second = tl.reduce((first * weight[:, None], second * weight[:, None]), 0, _add_two)
    return first * inverse, second * inverse, log_sum


@triton.jit
def merge_parts(
    partial_out,
    partial_lse,
    first_part,
    count,
    g,
    row,
    column,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    LINES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge what the splits left behind for one query head, each line some of them; returns its output in halves."""
    first = tl.zeros([LINES, HALF], tl.float32)
    second = tl.zeros([LINES, HALF], tl.float32)
    top = tl.full([LINES], -float("inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    line = tl.arange(0, LINES)
    for i in tl.static_range((SPLITS + LINES - 1) // LINES):
        # Other programs wrote these, so the first-level cache is passed by.
        part = (first_part + i * LINES + line).to(tl.int64) * GROUP + g
        logs = tl.load(
            partial_lse + part,
            mask=i * LINES + line < count,
            other=-float("inf"),
            cache_modifier=".cg",
        )
        exists = (i * LINES + row < count) & (column < D // 2)
        place = partial_out + ((first_part + i * LINES + row).to(tl.int64) * GROUP + g) * D + column
        first_half = tl.load(place, mask=exists, other=0.0, cache_modifier=".cg")
        second_half = tl.load(place + D // 2, mask=exists, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, logs)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        fade = tl.exp2(top - base)
        share = tl.exp2(logs - base)
        first = first * fade[:, None] + share[:, None] * first_half
        second = second * fade[:, None] + share[:, None] * second_half
        total = total * fade + share
        top = new_top
    first, second, _ = merge_lines(first, second, top, total)
    return first, second


@triton.jit
def _add_two(a, b, c, d):
    """Add pairs, so that two sums are exchanged between threads as one."""
    return a + c, b + d
