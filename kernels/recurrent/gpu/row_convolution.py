"""The causal convolution of one token of a decode row, in Triton.

The kernels load everything first, so that a program waits for memory once, and store the inputs that the next token
needs from the registers in which they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from kernels.gpu.functions import silu

if TYPE_CHECKING:
    from torch import Tensor

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
    factors = tl.load(conv + tap * C + channels, mask=exists[None, :] & (tap < W), other=0.0)
    added = tl.zeros([channel.shape[0]], tl.float32)
    if BIAS:
        added = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    return old + new, factors.to(tl.float32), added


@triton.jit
def convolve_row(inputs, factors, added):
    """Return the convolution, [channels] float32, of what `load_row` returns."""
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
