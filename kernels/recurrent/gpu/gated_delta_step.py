"""The gated delta rule for one token of each row: convolution, rule and gated norm of a head in one program.

With q and k of length 1, the state decayed, S, u = beta (v - S^T k) and o = S^T q + (k . q) u, so that one pass over
the state gives both sums, and another one writes S + k u^T.

Heads of one key head read the same inputs of the convolution, so their state may be replaced only when all of them have
read it: each program counts its arrival, none waits, and the last one writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.functions import silu
from kernels.recurrent import problem
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
def convolve_row(
    x, conv, bias, before, has_state, channel, exists,
    C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Convolve the input of one token and apply SiLU; [channels] float32.

    Args:
        x: [C], of the token.
        conv: [W, C].
        bias: [C], where BIAS.
        before: [W - 1, C] float32, inputs of the tokens before.
        has_state: whether there are such tokens.
        channel: of the result.
        exists: which of them exist; others give 0.
        TAPS: a power of two, at least W.
    """
    # One tile, whose loads each thread does for few channels; the threads exchange the sums.
    tap = tl.arange(0, TAPS)[:, None]
    channels = channel[None, :]
    old = tl.load(
        before + tap * C + channels, mask=exists[None, :] & (tap < W - 1) & has_state, other=0.0
    )
    new = tl.load(x + channels, mask=exists[None, :] & (tap == W - 1), other=0.0).to(tl.float32)
    factors = tl.load(conv + tap * C + channels, mask=exists[None, :] & (tap < W), other=0.0)
    total = tl.sum((old + new) * factors.to(tl.float32), 0)
    if BIAS:
        total += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    return silu(total)


@triton.jit
def replace_inputs(x, before, after, has_state, channel, exists, C: tl.constexpr, W: tl.constexpr):
    """Write the last W - 1 inputs of some channels after a token; all programs have read those before.

    Args:
        x: [C], of the token.
        before: [W - 1, C] float32.
        after: likewise, maybe the same.
        has_state: whether `before` is read.
        channel: which.
        exists: which of them exist.
    """
    for tap in tl.static_range(W - 2):
        value = tl.load(before + (tap + 1) * C + channel, mask=exists & has_state, other=0.0)
        # All threads have loaded what is replaced here, which the iteration before did.
        tl.debug_barrier()
        tl.store(after + tap * C + channel, value, mask=exists)
    tl.debug_barrier()
    value = tl.load(x + channel, mask=exists, other=0.0).to(tl.float32)
    tl.store(after + (W - 2) * C + channel, value, mask=exists)


@triton.jit
def unit(x, axis: tl.constexpr):
    """Scale vectors along an axis to length 1."""
    return x * tl.expand_dims(1.0 / tl.sqrt(tl.sum(x * x, axis) + NORM_EPS), axis)


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
        BV: a power of two; PARTS of them hold DV. With several parts, the state is read twice.
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
    # The first loads, since they take longest.
    tile = tl.load(
        source + key * DV + value[None, :], mask=(key < DK) & (value < DV)[None, :] & has_state, other=0.0
    )  # fmt: skip
    is_key = place < DK
    q_channel = group * DK + place
    k_channel = (G + group) * DK + place
    q = convolve_row(x, conv, bias, before, has_state, q_channel, is_key, C, W, TAPS, BIAS)
    k = convolve_row(x, conv, bias, before, has_state, k_channel, is_key, C, W, TAPS, BIAS)
    q = unit(q, 0) * scale
    k = unit(k, 0)
    kq = tl.sum(k * q, 0)
    replaces = write >= 0
    if H > G:
        # While the state is loaded.
        replaces &= is_last(arrivals + row * G + group, H // G)
    g, beta = load_gates(gates + row * gates_stride, a_log, dt_bias, head, True, H)
    decay = tl.exp(g)
    squares = 0.0
    for again in tl.static_range(1 if PARTS == 1 else 2):
        for part in tl.static_range(PARTS):
            at = part * BV + value
            is_value = at < DV
            exists = (key < DK) & is_value[None, :]
            if again + part > 0:
                tile = tl.load(source + key * DV + at[None, :], mask=exists & has_state, other=0.0)
            channel = 2 * G * DK + head * DV + at
            v = convolve_row(x, conv, bias, before, has_state, channel, is_value, C, W, TAPS, BIAS)
            known = tl.sum(tile * k[:, None], 0)
            seen = tl.sum(tile * q[:, None], 0)
            new = beta * (v - decay * known)
            o = tl.where(is_value, decay * seen + kq * new, 0.0)
            if again == 0:
                squares += tl.sum(o * o, 0)
            if again == 1 or PARTS == 1:
                tl.store(
                    target + key * DV + at[None, :], decay * tile + k[:, None] * new[None, :],
                    mask=exists & (write >= 0),
                )  # fmt: skip
                z = tl.load(x + C + head * DV + at, mask=is_value, other=0.0).to(tl.float32)
                weight = tl.load(norm + at, mask=is_value, other=0.0).to(tl.float32)
                y = o * (1.0 / tl.sqrt(squares / DV + eps)) * weight * silu(z)
                tl.store(
                    out + (row * H + head) * DV + at, y.to(out.dtype.element_ty), mask=is_value
                )
    if write >= 0:
        for part in tl.static_range(PARTS):
            at = part * BV + value
            channel = 2 * G * DK + head * DV + at
            replace_inputs(x, before, after, has_state, channel, at < DV, C, W)
    if replaces:
        replace_inputs(x, before, after, has_state, q_channel, is_key, C, W)
        replace_inputs(x, before, after, has_state, k_channel, is_key, C, W)
