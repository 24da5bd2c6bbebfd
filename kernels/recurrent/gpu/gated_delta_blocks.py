"""The gated delta rule for blocks of tokens of prompts: what does not depend on the states, for all blocks at once.

See `kernels.recurrent.pytorch.gated_delta` for the formula. With the state S before a block, the values that are new in
it are u + w S, its results (decay q) S + scores new, and the state after it is decay S + (remaining k)^T new. All but S
and `new` are computed here, so that the products with a state, which wait for each other, are as few as possible.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from kernels.gpu.functions import fast_silu
from kernels.recurrent.gpu.gated_delta_step import NORM_EPS, load_gates
from kernels.recurrent.gpu.tiles import find_block

PRECISION = tl.constexpr("tf32x3")
"""Of products of float32: three products of tensor cores, since one outside them keeps its operands in registers, and
takes minutes to compile."""
TOKENS = tl.constexpr(8)
"""Consecutive ones that a thread convolves."""
INDICES: Final = ["cu_seqlens", "positions", "slots", "kept_slots"]
"""Arguments whose alignment depends on the decode rows of a step; no wide loads depend on it."""


@triton.jit
def load_before(inputs, at, end, channel, exists, C: tl.constexpr, W: tl.constexpr):
    """Load inputs of a prompt, or of the tokens before it, [tokens, channels] float32; see `convolve_tile`.

    Args:
        inputs: as of `convolve_tile`.
        at: [tokens], in the prompt, at least 1 - W.
        end: the place after the last one; later ones give 0.
        channel: [channels].
        exists: which of them exist; others give 0.
    """
    x, x_stride, _conv, _bias, before, has_state, is_begin = inputs
    mask = (at >= 0) & (at < end)
    value = tl.load(
        x + at.to(tl.int64)[:, None] * x_stride + channel[None, :], mask=mask[:, None] & exists[None, :], other=0.0
    ).to(tl.float32)  # fmt: skip
    if is_begin:
        value += tl.load(
            before + (at + W - 1)[:, None] * C + channel[None, :],
            mask=exists[None, :] & (at < 0)[:, None] & has_state, other=0.0,
        )  # fmt: skip
    return value


@triton.jit
def convolve_tile(
    inputs, start, end, first, scale, factors, to,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, CHUNK: tl.constexpr,
    UNIT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Convolve the tokens of a block and apply SiLU; [CHUNK, BD] of `dtype`.

    A thread computes consecutive tokens, so that it loads and widens each input once. Tokens past the end give 0 where
    their factors are 0, and anything finite elsewhere.

    Args:
        inputs: of the prompt: x, [length, C], and the distance of its tokens; conv, [W, C]; bias, [C], where BIAS; the
            W - 1 inputs before the prompt's first one, [W - 1, C] float32; whether they are read, rather than zeros;
            and whether the block is the prompt's first one.
        start: place of the block's first token in the prompt.
        end: the place after that of the last one.
        first: of the D channels.
        scale: the length to which vectors are scaled, where UNIT.
        factors: [CHUNK] float32, by which results are multiplied; where UNIT, only those that are stored.
        to: [CHUNK, BD], where UNIT.
    """
    conv, bias = inputs[2], inputs[3]
    place = tl.arange(0, BD)
    exists = place < D
    channel = first + place
    group = tl.arange(0, CHUNK // TOKENS) * TOKENS
    x = inputs[0] + start.to(tl.int64) * inputs[1] + first
    offset = group[:, None] * inputs[1] + place[None, :]
    # All loads before the first store, which no later load may pass. The tuples grow in loops that Triton unrolls; mypy
    # takes them to be empty.
    raw = ()
    for i in tl.static_range(TOKENS):
        mask = (start + group + i < end)[:, None] & exists[None, :]
        raw = raw + (tl.load(x + i * inputs[1] + offset, mask=mask, other=0.0),)  # type: ignore[assignment]
    window = ()
    taps = ()
    for tap in tl.static_range(W):
        factor = tl.load(conv + tap * C + channel, mask=exists, other=0.0)
        taps = taps + (factor.to(tl.float32)[None, :],)  # type: ignore[assignment]
        if tap < W - 1:
            at = start + group + (tap - W + 1)
            window = window + (load_before(inputs, at, end, channel, exists, C, W),)  # type: ignore[assignment]
    shift = 0.0
    if BIAS:
        shift = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    factor = by_token(factors)
    found = ()
    for i in tl.static_range(TOKENS):
        window = window + (raw[i].to(tl.float32),)  # type: ignore[assignment]
        total = window[i] * taps[0]  # type: ignore[unreachable]
        for tap in tl.static_range(1, W):
            total += window[i + tap] * taps[tap]
        if BIAS:
            total += shift
        y = fast_silu(total)
        if UNIT:
            length = tl.sqrt(tl.sum(y * y, 1) + NORM_EPS)
            y = y * tl.where(start + group + i < end, scale / length, 0.0)[:, None]
            at = to + (group + i)[:, None] * BD + place[None, :]
            tl.store(at, (y * factor[i][:, None]).to(dtype))
        else:
            y = y * factor[i][:, None]
        found = found + (y.to(dtype),)
    pairs = tl.join(
        tl.join(tl.join(found[0], found[1]), tl.join(found[2], found[3])),  # type: ignore[misc]
        tl.join(tl.join(found[4], found[5]), tl.join(found[6], found[7])),  # type: ignore[misc]
    )
    return tl.reshape(tl.permute(pairs, 0, 4, 3, 2, 1), [CHUNK, BD])


@triton.jit
def by_token(x):
    """Split a vector: the part of number i has its elements i, i + TOKENS, and so on."""
    pairs = tl.reshape(x, [x.shape[0] // TOKENS, 2, 2, 2])
    low, high = tl.split(tl.permute(pairs, 0, 2, 3, 1))
    low_1, low_2 = tl.split(tl.permute(low, 0, 2, 1))
    high_1, high_2 = tl.split(tl.permute(high, 0, 2, 1))
    return tl.split(low_1) + tl.split(low_2) + tl.split(high_1) + tl.split(high_2)


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
def solve_blocks(
    projected, gates, conv, bias, a_log, dt_bias, conv_state, cu_seqlens, positions, slots, kept_slots, keys, values,
    scores, decays, rows, num_prompts, projected_stride, gates_stride, conv_stride, scale,
    H: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, SEQS: tl.constexpr,
    BIAS: tl.constexpr, OPERANDS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Convolve one head in one block and solve its triangular system; program (head, block).

    With q, k and v after the convolution, `decay` from the block's begin to each token, `remaining` from there to its
    end, and T the inverse of 1 + tril(beta (k k^T) exp(G_i - G_j), -1), it computes

        w = -T (beta decay k);  u = T (beta v);  scores = tril((q k^T) exp(G_i - G_j))

    Tokens past the prompt's or the block's end have zeros in all results.

    Args:
        projected: [T, q | k | v | z], of the tokens of prompts.
        gates: [T, b | a], likewise.
        conv: [W, C].
        bias: [C], where BIAS.
        a_log, dt_bias: [H].
        conv_state: [S, W - 1, C] float32, of any distance between slots.
        cu_seqlens, slots: as in `Segments`.
        positions: of the tokens of prompts.
        kept_slots: [T], of the tokens of prompts, where KEEPS; see `Segments`.
        keys: [N, H, 3, CHUNK, BK], w, decay q and remaining k.
        values: [N, H, BV, CHUNK], u transposed.
        scores: [N, H, CHUNK, CHUNK].
        decays: [N, H] float32, of a whole block.
        rows, num_prompts: R and Q of the step.
        scale: of queries.
        BK, BV: powers of two, at least DK and DV.
        PART: values that are computed at once; a power of two, at most BV.
        LEVELS: CHUNK = 2^LEVELS.
        OPERANDS: of `invert`.
    """
    C: tl.constexpr = 2 * G * DK + H * DV
    head = tl.program_id(0)
    number = tl.program_id(1)
    group = head // (H // G)
    prompt, first, length, block, begin = find_block(
        cu_seqlens, positions, num_prompts, number, CHUNK, SEQS
    )
    if prompt < num_prompts:
        read = tl.load(slots + 2 * (rows + prompt)).to(tl.int64)
        before = conv_state + read * conv_stride
        x = projected + first.to(tl.int64) * projected_stride
        token = tl.arange(0, CHUNK)
        start = tl.maximum(block * CHUNK - begin, 0)
        place = start + token
        has_state = read >= 0
        is_begin = start < W - 1
        end = tl.minimum((block + 1) * CHUNK - begin, length)
        is_token = place < end
        key = tl.arange(0, BK)
        dtype: tl.constexpr = keys.dtype.element_ty
        address = gates + (first + place).to(tl.int64) * gates_stride
        g, beta = load_gates(address, a_log, dt_bias, head, is_token, H)
        # Sums of strong decays differ by weak ones, so they need more digits than float32 has.
        total = tl.cumsum(g.to(tl.float64), 0)
        high = total.to(tl.float32)
        low = (total - high.to(tl.float64)).to(tl.float32)
        end_high = tl.sum(tl.where(token == CHUNK - 1, high, 0.0), 0)
        end_low = tl.sum(tl.where(token == CHUNK - 1, low, 0.0), 0)
        decay = tl.exp(high)
        remaining = tl.exp((end_high - high) + (end_low - low))
        it = (number * H + head).to(tl.int64)
        tl.store(decays + it, tl.exp(end_high))
        of_head = keys + it * (3 * CHUNK * BK)
        inputs = x, projected_stride, conv, bias, before, has_state, is_begin
        k = convolve_tile(
            inputs, start, end, (G + group) * DK, 1.0, remaining, of_head + 2 * CHUNK * BK,
            DK, BK, C, W, BIAS, CHUNK, True, dtype,
        )  # fmt: skip
        # Before the queries where both do not fit shared memory; elsewhere after them, since it needs registers.
        kk = 0.0
        if BK > 128:
            kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        q = convolve_tile(
            inputs, start, end, group * DK, scale, decay, of_head + CHUNK * BK,
            DK, BK, C, W, BIAS, CHUNK, True, dtype,
        )  # fmt: skip
        causal = token[:, None] >= token[None, :]
        distance = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        between = tl.where(causal, tl.exp(tl.where(causal, distance, 0.0)), 0.0)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        at_score = scores + it * (CHUNK * CHUNK) + token[:, None] * CHUNK + token[None, :]
        tl.store(at_score, (qk * between).to(dtype))
        if BK <= 128:
            kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        lower = tl.where(token[:, None] > token[None, :], beta[:, None] * kk * between, 0.0)
        inverse = invert(lower, CHUNK, LEVELS, OPERANDS)
        w = tl.dot((inverse * (-beta * decay)[None, :]).to(dtype), k, input_precision=PRECISION)
        tl.store(of_head + token[:, None] * BK + key[None, :], w.to(dtype))
        inverse = inverse.to(dtype)
        for part in tl.static_range(BV // PART):
            value = part * PART + tl.arange(0, PART)
            v = convolve_tile(
                inputs, start, end, 2 * G * DK + head * DV + part * PART, 1.0, beta, of_head,
                DV - part * PART, PART, C, W, BIAS, CHUNK, False, dtype,
            )  # fmt: skip
            u = tl.dot(inverse, v, input_precision=PRECISION)
            at_value = values + it * (BV * CHUNK) + value[:, None] * CHUNK + token[None, :]
            tl.store(at_value, tl.trans(u.to(dtype)))
        if KEEPS:
            kept = tl.load(kept_slots + first + end - 1).to(tl.int64)
            if kept >= 0:
                after = conv_state + kept * conv_stride
                every = tl.arange(0, BV)
                replace_last_inputs(
                    x, projected_stride, end, before, after, has_state, 2 * G * DK + head * DV + every, every < DV, C, W
                )  # fmt: skip
                if head % (H // G) == 0:
                    replace_last_inputs(
                        x, projected_stride, end, before, after, has_state, group * DK + key, key < DK, C, W
                    )  # fmt: skip
                    replace_last_inputs(
                        x, projected_stride, end, before, after, has_state, (G + group) * DK + key, key < DK, C, W
                    )  # fmt: skip
