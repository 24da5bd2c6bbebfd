"""The causal convolution of the tokens of decode rows, in Triton.

The kernels load everything first, so that a program waits for memory once, and store the inputs that the next token
needs from the registers in which they are. Those for rows with drafts add up what those for rows of one token do, in
tiles of the same sizes, so that a token has the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from kernels.gpu.functions import silu
from kernels.recurrent.gpu.tiles import slot_after

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.segments import Segments

_CHANNELS: Final = 256
"""Of a program."""


@triton.jit
def load_row(
    x, conv, bias, before, has_state, channel, exists,
    C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr = False,
):  # fmt: skip
    """Load the W inputs of some channels and their factors, [TAPS, channels] float32, and what is added, [channels].

    Args:
        x: [C], of the token; [b | c | x] where GATED, whose input is b * x.
        conv: [W, C].
        bias: [C], where BIAS.
        before: [W - 1, C] float32, inputs of the tokens before.
        has_state: whether there are such tokens; else zeros.
        channel: which.
        exists: which of them exist; others give 0.
        TAPS: a power of two, at least W.
    """
    # One tile, whose loads each thread does for few channels; the threads exchange the sums.
    tap = tl.arange(0, TAPS)[:, None]
    channels = channel[None, :]
    is_new = exists[None, :] & (tap == W - 1)
    old = tl.load(
        before + tap * C + channels, mask=exists[None, :] & (tap < W - 1) & has_state, other=0.0
    )
    new = tl.load(x + channels, mask=is_new, other=0.0).to(tl.float32)
    if GATED:
        new *= tl.load(x + 2 * C + channels, mask=is_new, other=0.0).to(tl.float32)
    factors, added = load_factors(conv, bias, channel, exists, C, W, TAPS, BIAS)
    return old + new, factors.to(tl.float32), added


@triton.jit
def load_factors(
    conv, bias, channel, exists, C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Load the factors of some channels, [TAPS, channels], and what is added, [channels] float32; see `load_row`."""
    tap = tl.arange(0, TAPS)[:, None]
    channels = channel[None, :]
    factors = tl.load(conv + tap * C + channels, mask=exists[None, :] & (tap < W), other=0.0)
    added = tl.zeros([channel.shape[0]], tl.float32)
    if BIAS:
        added = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    return factors, added


@triton.jit
def load_drafted(
    x, x_stride, number, before, has_state, channel, exists,
    C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, GATED: tl.constexpr = False,
):  # fmt: skip
    """Load the W inputs of some channels, [TAPS, channels] float32, for a token of a row with a draft.

    Args:
        x: as of `load_row`, of the row's first token.
        x_stride: from a token to the next one.
        number: of the token in its row.
        before: inputs of the tokens before the row; see `load_row`, also for the others.
    """
    tap = tl.arange(0, TAPS)[:, None]
    channels = channel[None, :]
    place = number + tap - (W - 1)
    is_new = exists[None, :] & (tap < W) & (place >= 0)
    old = tl.load(
        before + (number + tap) * C + channels,
        mask=exists[None, :] & (tap < W) & (place < 0) & has_state, other=0.0,
    )  # fmt: skip
    x += place.to(tl.int64) * x_stride
    new = tl.load(x + channels, mask=is_new, other=0.0).to(tl.float32)
    if GATED:
        new *= tl.load(x + 2 * C + channels, mask=is_new, other=0.0).to(tl.float32)
    return old + new


@triton.jit
def convolve_row(inputs, factors, added):
    """Return the convolution, [channels] float32, of what `load_row` or `load_drafted` and `load_factors` return."""
    return tl.sum(inputs * factors, 0) + added


@triton.jit
def store_inputs(
    after, inputs, channel, exists, C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr
):
    """Store the last W - 1 inputs of some channels; all programs and threads have read those before.

    Args:
        after: [W - 1, C] float32, maybe what was read.
        inputs: as of `load_row`.
        channel: which.
        exists: which of them are stored.
    """
    tap = tl.arange(0, TAPS)[:, None]
    mask = exists[None, :] & (tap > 0) & (tap < W)
    tl.store(after + (tap - 1) * C + channel[None, :], inputs, mask=mask)


@triton.jit
def convolve_rows(
    x, conv, bias, state, out, slots, x_stride, state_stride,
    C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute some channels of one decode row, and replace its state; program (channels, row).

    Args:
        x: [R, C]; [R, b | c | x] where GATED.
        conv: [W, C].
        bias: [C], where BIAS.
        state: [S, W - 1, C] float32, slots at any distance.
        out: [R, C]: c times the convolution of b * x where GATED, else its SiLU.
        slots: [R, 2].
        TAPS: a power of two, at least W.
    """
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < C
    read = tl.load(slots + 2 * row).to(tl.int64)
    write = tl.load(slots + 2 * row + 1).to(tl.int64)
    x += row * x_stride
    inputs, factors, added = load_row(
        x, conv, bias, state + read * state_stride, read >= 0, channel, exists, C, W, TAPS, BIAS, GATED
    )  # fmt: skip
    c = tl.load(x + C + channel, mask=exists & GATED, other=0.0).to(tl.float32)
    total = convolve_row(inputs, factors, added)
    total = c * total if GATED else silu(total)
    tl.store(out + row * C + channel, total.to(out.dtype.element_ty), mask=exists)
    # All threads have read the state.
    tl.debug_barrier()
    after = state + write * state_stride
    store_inputs(after, inputs, channel, exists & (write >= 0), C, W, TAPS)


@triton.jit
def convolve_drafts(
    x, conv, bias, state, out, cu_seqlens, slots, kept_slots, x_stride, state_stride,
    C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    RESULTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute some channels of the tokens of a decode row, the last one first; program (channels, row).

    The slot that is read may be the one that is written after the first token, but no other.

    Args:
        x, out: as of `convolve_rows`, [T, ...].
        cu_seqlens, kept_slots: as in `Segments`.
        RESULTS: whether `out` is written; else the states alone.

    The others are those of `convolve_rows`.
    """
    row = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < C
    first, end = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    read = tl.load(slots + 2 * row).to(tl.int64)
    write = tl.load(slots + 2 * row + 1)
    before = state + read * state_stride
    x += first.to(tl.int64) * x_stride
    factors, added = load_factors(conv, bias, channel, exists, C, W, TAPS, BIAS)
    for i in range(end - first):
        number = end - first - 1 - i
        token = (first + number).to(tl.int64)
        inputs = load_drafted(
            x, x_stride, number, before, read >= 0, channel, exists, C, W, TAPS, GATED
        )
        if RESULTS:
            gates = x + number.to(tl.int64) * x_stride + C
            c = tl.load(gates + channel, mask=exists & GATED, other=0.0).to(tl.float32)
            total = convolve_row(inputs, factors, added)
            total = c * total if GATED else silu(total)
            tl.store(out + token * C + channel, total.to(out.dtype.element_ty), mask=exists)
        # All threads have read the state.
        tl.debug_barrier()
        slot = slot_after(kept_slots, token, end, write)
        after = state + slot * state_stride
        store_inputs(after, inputs, channel, exists & (slot >= 0), C, W, TAPS)


def causal_conv_of_rows(
    x: Tensor,
    conv: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    out: Tensor,
    *,
    gated: bool = False,
) -> None:
    """Convolve the decode rows of a step, and write the states after them.

    Args:
        x: [R, channels], of any distance between rows; [R, b | c | x] if gated.
        conv: [W, channels] contiguous.
        bias: [channels] or None.
        state: [S, W - 1, channels] float32, contiguous in a slot.
        slots: [R, 2].
        out: [R, channels] contiguous: c times the convolution of b * x if gated, else its SiLU.
        gated: see `x`.
    """
    width, channels = conv.shape
    convolve_rows[triton.cdiv(channels, _CHANNELS), len(out)](
        x, conv, conv if bias is None else bias, state, out, slots, x.stride(0), state.stride(0),
        C=channels, W=width, TAPS=triton.next_power_of_2(width), BIAS=bias is not None, GATED=gated,
        CHANNELS=_CHANNELS, num_warps=4,
    )  # fmt: skip


def causal_conv_of_drafts(
    x: Tensor,
    conv: Tensor,
    bias: Tensor | None,
    state: Tensor,
    segments: Segments,
    out: Tensor | None,
    *,
    gated: bool = False,
) -> None:
    """Convolve decode rows with drafts, and write the states after each token.

    Args:
        x: [T, ...], as of `causal_conv_of_rows`.
        conv, bias, state, gated: as of `causal_conv_of_rows`.
        segments: of the step, `by_token`.
        out: [T, channels], as of `causal_conv_of_rows`; None if only states are written.
    """
    assert segments.kept_slots is not None
    width, channels = conv.shape
    convolve_drafts[triton.cdiv(channels, _CHANNELS), segments.num_prompts](
        x, conv, conv if bias is None else bias, state, state if out is None else out,
        segments.cu_seqlens, segments.slots, segments.kept_slots, x.stride(0), state.stride(0),
        C=channels, W=width, TAPS=triton.next_power_of_2(width), BIAS=bias is not None, GATED=gated,
        RESULTS=out is not None, CHANNELS=_CHANNELS, num_warps=4,
    )  # fmt: skip
