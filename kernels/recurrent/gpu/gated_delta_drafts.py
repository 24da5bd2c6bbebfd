"""The gated delta rule of decode rows with drafts: launches for the rule, for the norm and for the inputs kept.

A token has the bits that `gated_delta_step` gives, which computes the same in tiles of the same sizes. But each program
has some values of a head for all tokens of a row, so that their state stays in its registers, and none writes an input
of the convolution, which those of other heads read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.functions import product, silu
from kernels.recurrent.gpu.gated_delta_step import compare, load_gates, normalize, unit
from kernels.recurrent.gpu.row_convolution import convolve_row, load_drafted, load_factors
from kernels.recurrent.gpu.tiles import slot_after


@triton.jit
def apply_rule_to_drafts(
    projected, gates, conv, bias, a_log, dt_bias, conv_state, state, cu_seqlens, slots, kept_slots, results,
    projected_stride, gates_stride, conv_stride, state_stride, scale,
    H: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PARTS: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute some values of a head for the tokens of a row, one after the other; program (part of all heads, row).

    Args:
        projected: [T, q | k | v | z].
        gates: [T, b | a].
        cu_seqlens, kept_slots: as in `Segments`.
        slots: [R, 2].
        results: [T, H, DV] float32, before the norm.

    The others are those of `gated_delta_step`.
    """
    C: tl.constexpr = 2 * G * DK + H * DV
    head = tl.program_id(0) // PARTS
    row = tl.program_id(1)
    group = head // (H // G)
    first, end = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    read = tl.load(slots + 2 * row).to(tl.int64)
    write = tl.load(slots + 2 * row + 1)
    has_state = read >= 0
    x = projected + first.to(tl.int64) * projected_stride
    before = conv_state + read * conv_stride
    place = tl.arange(0, BK)
    key = place[:, None]
    part = (tl.program_id(0) % PARTS) * BV
    value = tl.arange(0, BV)
    is_key, is_value = place < DK, part + value < DV
    is_tile = (key < DK) & is_value[None, :]
    state += head * (DK * DV) + part
    at_tile = key * DV + value[None, :]
    tile = tl.zeros([BK, BV], tl.float32)
    q_channel = group * DK + place
    k_channel = (G + group) * DK + place
    v_channel = 2 * G * DK + head * DV + part + value
    q_factors, q_added = load_factors(conv, bias, q_channel, is_key, C, W, TAPS, BIAS)
    k_factors, k_added = load_factors(conv, bias, k_channel, is_key, C, W, TAPS, BIAS)
    v_factors, v_added = load_factors(conv, bias, v_channel, is_value, C, W, TAPS, BIAS)
    for number in range(end - first):
        token = first + number
        at = token.to(tl.int64)
        of_q = load_drafted(
            x, projected_stride, number, before, has_state, q_channel, is_key, C, W, TAPS
        )
        of_k = load_drafted(
            x, projected_stride, number, before, has_state, k_channel, is_key, C, W, TAPS
        )
        of_v = load_drafted(
            x, projected_stride, number, before, has_state, v_channel, is_value, C, W, TAPS
        )
        g, beta = load_gates(gates + at * gates_stride, a_log, dt_bias, head, True, H)
        # Of the first token alone. A load in the loop, after the others, gives
        # the tile the layout that it has in `gated_delta_step`.
        reads = is_tile & has_state & (number == 0)
        tile = tl.load(state + read * state_stride + at_tile, mask=reads, other=tile)
        q = unit(silu(convolve_row(of_q, q_factors, q_added)), 0) * scale
        k = unit(silu(convolve_row(of_k, k_factors, k_added)), 0)
        kq = tl.sum(k * q, 0)
        v = silu(convolve_row(of_v, v_factors, v_added))
        decay = tl.exp(g)
        new, seen = compare(tile, q, k, v, decay, beta)
        tile = tl.fma(tile, decay, product(k[:, None], new[None, :]))
        slot = slot_after(kept_slots, token, end, write)
        tl.store(state + slot * state_stride + at_tile, tile, mask=is_tile & (slot >= 0))
        tl.store(
            results + (at * H + head) * DV + part + value,
            tl.fma(new, kq, product(decay, seen)),
            mask=is_value,
        )


@triton.jit
def normalize_drafts(
    results, projected, norm, out, projected_stride, eps,
    H: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Normalize and gate a head of a token; program (head, token).

    Args:
        results: [T, H, DV] float32, of `apply_rule_to_drafts`.
        out: [T, H, DV].

    The others are those of `gated_delta_step`.
    """
    C: tl.constexpr = 2 * G * DK + H * DV
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    part, value = tl.arange(0, PARTS)[:, None], tl.arange(0, BV)
    values = part * BV + value[None, :]
    is_value = values < DV
    line = (token * H + head) * DV
    z = projected + token * projected_stride + C + head * DV
    gate = tl.load(z + values, mask=is_value, other=0.0).to(tl.float32)
    weight = tl.load(norm + values, mask=is_value, other=0.0).to(tl.float32)
    # Made of parts, as in `gated_delta_step`, so that the sum of squares has the same order.
    o = tl.zeros([PARTS, BV], tl.float32)
    for i in tl.static_range(PARTS):
        at = i * BV + value
        some = tl.load(results + line + at, mask=at < DV, other=0.0)
        o = tl.where(part == i, some[None, :], o)
    y = normalize(o, weight, gate, eps, DV)
    tl.store(out + line + values, y.to(out.dtype.element_ty), mask=is_value)
