"""The gated delta rule for blocks of tokens of prompts: what does not depend on the states, for all blocks at once.

See `kernels.recurrent.pytorch.gated_delta` for the formula. `carry_states` needs of each block its queries, keys and
values, the inverse of its triangular system, the scores of its queries, and the factors of its decays.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from kernels.gpu.functions import silu
from kernels.recurrent.gpu.gated_delta_step import load_gates, unit
from kernels.recurrent.gpu.tiles import find_block

PRECISION = tl.constexpr("tf32x3")
"""Of products of float32: three products of tensor cores, since one outside them keeps its operands in registers, and
takes minutes to compile."""
INDICES: Final = ["cu_seqlens", "positions", "slots", "kept_slots"]
"""Arguments whose alignment depends on the decode rows of a step; no wide loads depend on it."""
FACTORS = tl.constexpr(3)
"""Vectors of a block and head: beta, the decays from the block's begin to each token, and from there to its end."""


@triton.jit
def convolve_tile(
    x, x_stride, conv, bias, before, is_begin, place, length, exists, channel,
    CHANNELS: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Convolve some tokens of a prompt and apply SiLU; [tokens, channels] float32.

    Args:
        x: [length, CHANNELS], of the prompt.
        conv: [W, CHANNELS].
        bias: [CHANNELS], where BIAS.
        before: [W - 1, CHANNELS] float32, inputs of the tokens before the prompt's first one.
        is_begin: whether some of the tokens read `before`.
        place: [tokens], in the prompt.
        length: of the prompt.
        exists: which tokens and channels exist; others give 0.
        channel: [channels].
    """
    total = tl.zeros([place.shape[0], channel.shape[0]], tl.float32)
    for tap in tl.static_range(W):
        at = place + (tap - W + 1)
        value = tl.load(
            x + at.to(tl.int64)[:, None] * x_stride + channel[None, :],
            mask=exists & ((at >= 0) & (at < length))[:, None], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if is_begin & (tap < W - 1):
            value += tl.load(
                before + (at + W - 1)[:, None] * CHANNELS + channel[None, :],
                mask=exists & (at < 0)[:, None], other=0.0,
            )  # fmt: skip
        factor = tl.load(conv + tap * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        total += value * factor.to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]
    return tl.where(exists, silu(total), 0.0)


@triton.jit
def replace_last_inputs(
    x, x_stride, length, before, after, has_state, channel, exists, C: tl.constexpr, W: tl.constexpr
):
    """Write the last W - 1 inputs of some channels after a prompt, or a part of it; no other program reads `after`.

    Args:
        x: [length, C], of the prompt.
        before: [W - 1, C] float32.
        after: likewise, maybe the same.
        has_state: whether `before` is read.
        channel: which.
        exists: which of them exist.
    """
    for tap in tl.static_range(W - 1):
        at = length - (W - 1) + tap
        value = tl.load(
            x + at.to(tl.int64) * x_stride + channel, mask=exists & (at >= 0), other=0.0
        )
        kept = tl.load(
            before + (at + W - 1) * C + channel, mask=exists & (at < 0) & has_state, other=0.0
        )
        # All threads have loaded what is replaced here: the inputs kept move forward.
        tl.debug_barrier()
        tl.store(after + tap * C + channel, value.to(tl.float32) + kept, mask=exists)


@triton.jit
def invert(lower, C: tl.constexpr, LEVELS: tl.constexpr, OPERANDS: tl.constexpr):
    """Return the inverse of a unit lower triangular matrix, [C, C], C = 2^LEVELS, from what is below its diagonal.

    With the inverses of diagonal blocks of size s, those of size 2 s are T - T M T, with M the part of the matrix in
    them that is in none of size s. Unlike sums of powers of `lower`, it has no large intermediate values: an element of
    the inverse is what a token changes in a later one, at most 1. So float16, which has as many digits as the tensor
    cores' float32, is enough for them.

    Args:
        lower: float32; elements on and above the diagonal are 0.
        OPERANDS: dtype of the products' operands.
    """
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        # Of blocks of 2^level rows, those beside each other in a block of twice the size.
        inside = (row >> level != column >> level) & (row >> level + 1 == column >> level + 1)
        between = tl.where(inside, lower, 0.0)
        before = inverse.to(OPERANDS)
        product = tl.dot(before, between.to(OPERANDS), input_precision=PRECISION)
        inverse -= tl.dot(product.to(OPERANDS), before, input_precision=PRECISION)
    return inverse


@triton.jit(do_not_specialize=["rows", "num_prompts"], do_not_specialize_on_alignment=INDICES)
def convolve_heads(
    projected, conv, bias, conv_state, cu_seqlens, positions, slots, kept_slots, keys, values, rows, num_prompts,
    projected_stride, conv_stride, scale,
    H: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, CHUNK: tl.constexpr, SEQS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    """Convolve one head of queries, keys or values in ROWS tokens of a block; program (head of 2 G + H, tokens).

    Args:
        projected: [T, q | k | v | z], of the tokens of prompts.
        conv: [W, C].
        bias: [C], where BIAS.
        conv_state: [S, W - 1, C] float32, of any distance between slots.
        cu_seqlens, slots: as in `Segments`.
        positions: of the tokens of prompts.
        kept_slots: [T], of the tokens of prompts, where KEEPS; see `Segments`.
        keys: [N, 2, G, CHUNK, BK], queries and keys, normalized; those of tokens past the prompt's or the block's end
            are 0, as are values of such tokens.
        values: [N, H, CHUNK, BV].
        rows, num_prompts: R and Q of the step.
        scale: of queries.
        BK, BV: powers of two, at least DK and DV.
    """
    C: tl.constexpr = 2 * G * DK + H * DV
    head = tl.program_id(0)
    number = tl.program_id(1) // (CHUNK // ROWS)
    prompt, first, length, block, begin = find_block(
        cu_seqlens, positions, num_prompts, number, CHUNK, SEQS
    )
    if prompt < num_prompts:
        read = tl.load(slots + 2 * (rows + prompt)).to(tl.int64)
        before = conv_state + read * conv_stride
        x = projected + first.to(tl.int64) * projected_stride
        token = tl.program_id(1) % (CHUNK // ROWS) * ROWS + tl.arange(0, ROWS)
        # The first block has fewer tokens if the prompt begins within one.
        place = tl.maximum(block * CHUNK - begin, 0) + token
        is_begin = (tl.min(place, 0) < W - 1) & (read >= 0)
        end = tl.minimum((block + 1) * CHUNK - begin, length)
        is_token = place < end
        kept = tl.cast(-1, tl.int64)
        if KEEPS:
            kept = tl.load(kept_slots + first + end - 1).to(tl.int64)
        after = conv_state + kept * conv_stride
        # One program of those of a block and head.
        keeps = (kept >= 0) & (tl.program_id(1) % (CHUNK // ROWS) == 0)
        if head < 2 * G:
            key = tl.arange(0, BK)
            k = convolve_tile(
                x, projected_stride, conv, bias, before, is_begin, place, length,
                is_token[:, None] & (key < DK)[None, :], head * DK + key, C, W, BIAS,
            )  # fmt: skip
            k = unit(k, 1) * tl.where(head < G, scale, 1.0)
            at = (number * (2 * G) + head).to(tl.int64) * (CHUNK * BK)
            at_key = at + token[:, None] * BK + key[None, :]
            tl.store(keys + at_key, k.to(keys.dtype.element_ty))
            if keeps:
                replace_last_inputs(
                    x,
                    projected_stride,
                    end,
                    before,
                    after,
                    read >= 0,
                    head * DK + key,
                    key < DK,
                    C,
                    W,
                )
        else:
            value = tl.arange(0, BV)
            v = convolve_tile(
                x, projected_stride, conv, bias, before, is_begin, place, length,
                is_token[:, None] & (value < DV)[None, :], 2 * G * DK + (head - 2 * G) * DV + value, C, W, BIAS,
            )  # fmt: skip
            at = (number * H + head - 2 * G).to(tl.int64) * (CHUNK * BV)
            at_value = at + token[:, None] * BV + value[None, :]
            tl.store(values + at_value, v.to(values.dtype.element_ty))
            if keeps:
                replace_last_inputs(
                    x, projected_stride, end, before, after, read >= 0, 2 * G * DK + (head - 2 * G) * DV + value,
                    value < DV, C, W,
                )  # fmt: skip


@triton.jit(do_not_specialize=["num_prompts"], do_not_specialize_on_alignment=INDICES)
def solve_blocks(
    gates, a_log, dt_bias, cu_seqlens, positions, keys, squares, factors, num_prompts, gates_stride,
    H: tl.constexpr, G: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    SEQS: tl.constexpr, OPERANDS: tl.constexpr,
):  # fmt: skip
    """Compute the scores and the inverse of one head in one block; program (head, block).

    Args:
        gates: [T, b | a], of the tokens of prompts.
        a_log, dt_bias: [H].
        cu_seqlens, positions, keys: as of `convolve_heads`.
        squares: [N, H, 2, CHUNK, CHUNK], scores and inverse.
        factors: [N, H, FACTORS, CHUNK] float32.
        num_prompts: Q of the step.
        LEVELS: CHUNK = 2^LEVELS.
        OPERANDS: of `invert`.
    """
    head = tl.program_id(0)
    number = tl.program_id(1)
    prompt, first, length, block, begin = find_block(
        cu_seqlens, positions, num_prompts, number, CHUNK, SEQS
    )
    if prompt < num_prompts:
        token = tl.arange(0, CHUNK)
        place = tl.maximum(block * CHUNK - begin, 0) + token
        is_token = place < tl.minimum((block + 1) * CHUNK - begin, length)
        key = tl.arange(0, BK)
        at = (number * (2 * G) + head // (H // G)).to(tl.int64) * (CHUNK * BK)
        at_key = keys + at + token[:, None] * BK + key[None, :]
        dtype: tl.constexpr = keys.dtype.element_ty
        q = tl.load(at_key)
        k = tl.load(at_key + G * (CHUNK * BK))
        kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        address = gates + (first + place).to(tl.int64) * gates_stride
        g, beta = load_gates(address, a_log, dt_bias, head, is_token, H)
        # Sums of strong decays differ by weak ones, so they need more digits than float32 has.
        total = tl.cumsum(g.to(tl.float64), 0)
        high = total.to(tl.float32)
        low = (total - high.to(tl.float64)).to(tl.float32)
        it = (number * H + head).to(tl.int64)
        end_high = tl.sum(tl.where(token == CHUNK - 1, high, 0.0), 0)
        end_low = tl.sum(tl.where(token == CHUNK - 1, low, 0.0), 0)
        factor = factors + it * (FACTORS * CHUNK) + token
        tl.store(factor, beta)
        tl.store(factor + CHUNK, tl.exp(high))
        tl.store(factor + 2 * CHUNK, tl.exp((end_high - high) + (end_low - low)))
        causal = token[:, None] >= token[None, :]
        distance = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        between = tl.where(causal, tl.exp(tl.where(causal, distance, 0.0)), 0.0)
        square = squares + it * (2 * CHUNK * CHUNK) + token[:, None] * CHUNK + token[None, :]
        tl.store(square, (qk * between).to(dtype))
        lower = tl.where(token[:, None] > token[None, :], beta[:, None] * kk * between, 0.0)
        inverse = invert(lower, CHUNK, LEVELS, OPERANDS)
        tl.store(square + CHUNK * CHUNK, inverse.to(dtype))
