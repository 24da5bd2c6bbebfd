"""The gated delta rule of decode rows: convolution, rule and gated norm of a head in one program.

With q and k of length 1, the state decayed, S, u = beta (v - S^T k) and o = S^T q + (k . q) u, so that one pass over
the state gives both sums, and another one writes S + k u^T.

Heads of one key head read the same inputs of the convolution, so their state may be replaced only when all of them have
read it: each program counts its arrival, none waits, and the last one writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.functions import product, silu
from kernels.recurrent import problem
from kernels.recurrent.gpu.row_convolution import convolve_row, load_row, store_inputs
from kernels.recurrent.gpu.tiles import is_last, softplus

LEAST_DECAY = tl.constexpr(problem.LEAST_DECAY)
NORM_EPS = tl.constexpr(problem.NORM_EPS)


@triton.jit
def load_gates(gates, a_log, dt_bias, head, mask, H: tl.constexpr):
    """Return the logarithm of the decay and beta, float32, of a head.

    Args:
        gates: addresses of tokens' gates.
        a_log, dt_bias: [H].
        head: its number.
        mask: tokens that exist; others have no decay and a beta of 0.
        H: number of heads.
    """
    b = tl.load(gates + head, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(gates + H + head, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    g = -rate * softplus(a + tl.load(dt_bias + head).to(tl.float32))
    g = tl.where(mask, tl.maximum(g, LEAST_DECAY), 0.0)
    return g, tl.where(mask, 1.0 / (1.0 + tl.exp(-b)), 0.0)


@triton.jit
def unit(x, axis: tl.constexpr):
    """Scale vectors along an axis to length 1."""
    return x * tl.expand_dims(1.0 / tl.sqrt(tl.sum(x * x, axis) + NORM_EPS), axis)


@triton.jit
def compare(state, q, k, v, decay, beta):
    """Return what is new in some values of a token, and what the state before gives for its query, [values] each.

    Args:
        state: of a head, [keys, values], before the token.
        q, k: [keys].
        v: [values].
        decay, beta: of the token.
    """
    known = tl.sum(state * k[:, None], 0)
    seen = tl.sum(state * q[:, None], 0)
    return beta * (v - product(decay, known)), seen


@triton.jit
def normalize(o, weight, z, eps, DV: tl.constexpr):
    """Return the gated norm of a head's results; those that do not exist are 0."""
    return o * (1.0 / tl.sqrt(tl.sum(o * o) / DV + eps)) * weight * silu(z)


@triton.jit
def gated_delta_step(
    projected, gates, conv, bias, a_log, dt_bias, norm, conv_state, state, slots, out, arrivals,
    projected_stride, gates_stride, conv_stride, state_stride, eps, scale,
    H: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PARTS: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute one head of one row; program (head, row).

    Args:
        projected: [R, q | k | v | z].
        gates: [R, b | a].
        conv: [W, C].
        bias: [C], where BIAS.
        a_log, dt_bias: [H].
        norm: [DV].
        conv_state: [S, W - 1, C] float32, of any distance between slots.
        state: [S, H, DK, DV] float32, likewise.
        slots: [R, 2].
        out: [R, H, DV].
        arrivals: [R, G] int32 of 0, which they are again afterwards.
        eps: of the norm.
        scale: of queries.
        BK: a power of two, at least DK.
        TAPS: a power of two, at least W.
        BV: a power of two; PARTS of them, likewise, hold DV. The next part is loaded while one is computed.
    """
    C: tl.constexpr = 2 * G * DK + H * DV
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    group = head // (H // G)
    read = tl.load(slots + 2 * row).to(tl.int64)
    write = tl.load(slots + 2 * row + 1).to(tl.int64)
    has_state = read >= 0
    x = projected + row * projected_stride
    before = conv_state + read * conv_stride
    after = conv_state + write * conv_stride
    place = tl.arange(0, BK)
    key = place[:, None]
    source = state + read * state_stride + head * (DK * DV)
    target = state + write * state_stride + head * (DK * DV)
    value = tl.arange(0, BV)
    is_tile = (key < DK) & has_state
    at_tile = key * DV + value[None, :]
    # The first loads, since they take longest.
    tile = tl.load(source + at_tile, mask=is_tile & (value < DV)[None, :], other=0.0)
    is_key = place < DK
    q_channel = group * DK + place
    k_channel = (G + group) * DK + place
    v_channel = 2 * G * DK + head * DV + value
    of_q, q_factors, q_added = load_row(
        x, conv, bias, before, has_state, q_channel, is_key, C, W, TAPS, BIAS
    )
    of_k, k_factors, k_added = load_row(
        x, conv, bias, before, has_state, k_channel, is_key, C, W, TAPS, BIAS
    )
    of_v, v_factors, v_added = load_row(
        x, conv, bias, before, has_state, v_channel, value < DV, C, W, TAPS, BIAS
    )
    g, beta = load_gates(gates + row * gates_stride, a_log, dt_bias, head, True, H)
    part = tl.arange(0, PARTS)[:, None]
    values = part * BV + value[None, :]
    is_value = values < DV
    z = tl.load(x + C + head * DV + values, mask=is_value, other=0.0).to(tl.float32)
    weight = tl.load(norm + values, mask=is_value, other=0.0).to(tl.float32)
    replaces = write >= 0
    if H > G:
        # While the state is loaded.
        replaces &= is_last(arrivals + row * G + group, H // G)
    q = unit(silu(convolve_row(of_q, q_factors, q_added)), 0) * scale
    k = unit(silu(convolve_row(of_k, k_factors, k_added)), 0)
    kq = tl.sum(k * q, 0)
    decay = tl.exp(g)
    o = tl.zeros([PARTS, BV], tl.float32)
    for i in tl.static_range(PARTS):
        at = i * BV + value
        next_tile, of_next, next_factors, next_added = tile, of_v, v_factors, v_added
        if i + 1 < PARTS:
            next_tile = tl.load(
                source + at_tile + (i + 1) * BV, mask=is_tile & (at + BV < DV)[None, :], other=0.0
            )
            of_next, next_factors, next_added = load_row(
                x, conv, bias, before, has_state, v_channel + (i + 1) * BV, at + BV < DV, C, W, TAPS, BIAS
            )  # fmt: skip
        v = silu(convolve_row(of_v, v_factors, v_added))
        new, seen = compare(tile, q, k, v, decay, beta)
        tl.store(
            target + at_tile + i * BV, tl.fma(tile, decay, product(k[:, None], new[None, :])),
            mask=(key < DK) & (at < DV)[None, :] & (write >= 0),
        )  # fmt: skip
        o = tl.where(part == i, tl.fma(new, kq, product(decay, seen))[None, :], o)
        # All threads have loaded what is replaced here.
        tl.debug_barrier()
        store_inputs(after, of_v, v_channel + i * BV, (at < DV) & (write >= 0), C, W, TAPS)
        tile, of_v, v_factors, v_added = next_tile, of_next, next_factors, next_added
    store_inputs(after, of_q, q_channel, is_key & replaces, C, W, TAPS)
    store_inputs(after, of_k, k_channel, is_key & replaces, C, W, TAPS)
    o = tl.where(is_value, o, 0.0)
    y = normalize(o, weight, z, eps, DV)
    tl.store(out + (row * H + head) * DV + values, y.to(out.dtype.element_ty), mask=is_value)
