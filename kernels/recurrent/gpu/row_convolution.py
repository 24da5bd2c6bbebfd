"""The causal convolution of one token of a decode row, in Triton.

The kernels load everything first, so that a program waits for memory once, and store the inputs that the next token
needs from the registers in which they are.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
