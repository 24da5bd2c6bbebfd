"""The causal convolution of prompts in Triton; `kernels.recurrent.gpu.row_convolution` has that of decode rows.

A state is often replaced in its slot, so nothing may write it before all programs have read it. Of a prompt, the
program of the first tile is the only one that reads the state, since a tile has more tokens than the convolution has
taps, and the only one that writes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from kernels.gpu.functions import silu
from kernels.recurrent.gpu.tiles import find_tile, sequences

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.segments import Segments

TOKENS: Final = 64
GATED_TOKENS: Final = 32
"""Of a tile of a prompt, which shares the weights, and of one with gates, at most `CHUNK`."""
CHANNELS: Final = 128
"""Of a program for prompts."""


@triton.jit
def load_inputs(x, at, channel, mask, C: tl.constexpr, GATED: tl.constexpr):
    """Load inputs of the convolution, float32: x, or the product of b and x of a row [b | c | x]."""
    value = tl.load(x + at + channel, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        value *= tl.load(x + at + channel + 2 * C, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def convolve_tile(
    x, weight, bias, before, read, out, tile, length, channel, exists, x_stride, out_stride,
    C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, IS_FIRST: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of a tile and store them.

    Args:
        x, out: of the prompt's first token.
        before: its state, which the first tile reads.
        read: the slot of that; -1 for zeros.
        tile: the number of the tile.
        channel: [channels].
        exists: likewise.
    """
    token = tile * TOKENS + tl.arange(0, TOKENS)[:, None]
    total = tl.zeros([TOKENS, channel.shape[0]], tl.float32)
    for i in tl.static_range(W):
        place = token + (i - W + 1)
        mask = exists[None, :] & (place >= 0) & (place < length)
        value = load_inputs(x, place.to(tl.int64) * x_stride, channel[None, :], mask, C, GATED)
        if IS_FIRST:
            kept = exists[None, :] & (place < 0) & (read >= 0)
            value += tl.load(before + (place + W - 1) * C + channel[None, :], mask=kept, other=0.0)
        factor = tl.load(weight + channel * W + i, mask=exists, other=0.0)
        total += value * factor.to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = silu(total)
    is_token = exists[None, :] & (token < length)
    if GATED:
        at = token.to(tl.int64) * x_stride + channel[None, :] + C
        total *= tl.load(x + at, mask=is_token, other=0.0).to(tl.float32)
    at = token.to(tl.int64) * out_stride + channel[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_token)


@triton.jit(do_not_specialize=["rows", "num_prompts"])
def convolve_prompts(
    x, weight, bias, state, out, cu_seqlens, slots, kept_slots, rows, num_prompts, x_stride, out_stride,
    state_stride,
    C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, KEEPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of a tile of a prompt; program (channels, tile).

    Args:
        x: [T, C], or [T, b | c | x] where GATED, of the tokens of prompts.
        weight: [C, W].
        bias: [C], where BIAS.
        state: [S, W - 1, C] float32, slots at any distance.
        out: [T, C] of the tokens of prompts.
        cu_seqlens: as in `Segments`.
        slots: likewise.
        kept_slots: likewise, where KEEPS. A tile has one such token at most, since those of a prompt are CHUNK apart.
        TAPS: a power of two, at least W - 1.
    """
    prompt, first, length, tile = find_tile(cu_seqlens, num_prompts, tl.program_id(1), TOKENS, SEQS)
    if prompt < num_prompts:
        lane = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        is_lane = lane < C
        channel, exists = lane[None, :], is_lane[None, :]
        read = tl.load(slots + 2 * (rows + prompt)).to(tl.int64)
        write = tl.load(slots + 2 * (rows + prompt) + 1).to(tl.int64)
        x += first.to(tl.int64) * x_stride
        before = state + read * state_stride
        old = before + channel
        to = out + first.to(tl.int64) * out_stride
        # Loads of float32 states would give all tiles their layout of registers, which does not suit the inputs.
        if tile == 0:
            convolve_tile(
                x, weight, bias, before, read, to, tile, length, lane, is_lane, x_stride, out_stride,
                C, W, BIAS, GATED, SILU, TOKENS, True,
            )  # fmt: skip
        else:
            convolve_tile(
                x, weight, bias, before, read, to, tile, length, lane, is_lane, x_stride, out_stride,
                C, W, BIAS, GATED, SILU, TOKENS, False,
            )  # fmt: skip
        if KEEPS:
            each = tile * TOKENS + tl.arange(0, TOKENS)
            kept = tl.load(kept_slots + first + each, mask=each < length, other=-1)
            slot = tl.max(kept, 0).to(tl.int64)
            if slot >= 0:
                stop = tl.sum(tl.where(kept >= 0, each + 1, 0), 0)
                kept_inputs = last_inputs(
                    x, x_stride, old, read, stop, channel, exists, C, W, TAPS, GATED
                )
                store_inputs(state + slot * state_stride, kept_inputs, channel, exists, C, W, TAPS)
        if (tile == 0) & (write >= 0):
            inputs = last_inputs(x, x_stride, old, read, length, channel, exists, C, W, TAPS, GATED)
            # All threads have read the state.
            tl.debug_barrier()
            store_inputs(state + write * state_stride, inputs, channel, exists, C, W, TAPS)


@triton.jit
def last_inputs(
    x, x_stride, old, read, stop, channel, exists,
    C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Load the last W - 1 inputs before token `stop` of a prompt, [TAPS, channels] float32, older ones from its state.

    Args:
        x: of the prompt's first token.
        old: the channels of its state, the oldest input.
        read: the slot of that; -1 for zeros.
        stop: a number of tokens of the prompt.
        channel: [1, channels].
        exists: likewise.
    """
    tap = tl.arange(0, TAPS)[:, None]
    source = stop - (W - 1) + tap
    is_tap = exists & (tap < W - 1)
    value = load_inputs(
        x, source.to(tl.int64) * x_stride, channel, is_tap & (source >= 0), C, GATED
    )
    is_old = is_tap & (source < 0) & (read >= 0)
    return value + tl.load(old + (source + W - 1) * C, mask=is_old, other=0.0)


@triton.jit
def store_inputs(
    state, inputs, channel, exists, C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr
):
    """Store what `last_inputs` returns in the state of a slot."""
    tap = tl.arange(0, TAPS)[:, None]
    tl.store(state + tap * C + channel, inputs, mask=exists & (tap < W - 1))


def taps(width: int) -> int:
    """Return TAPS of a convolution of `width` tokens."""
    return int(triton.next_power_of_2(width - 1))


def causal_conv_of_prompts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    segments: Segments,
    out: Tensor,
    *,
    silu: bool,
    gated: bool = False,
) -> None:
    """Convolve the prompts of a step, and write the states after them; decode rows are left out.

    Args:
        x: [T, channels] of all tokens; [T, b | c | x] if gated; contiguous in channels.
        weight: [channels, W] contiguous.
        bias: [channels] or None.
        state: [S, W - 1, channels] float32, contiguous in a slot.
        segments: of the step.
        out: [T - R, channels], of the tokens of prompts; contiguous in channels.
        silu: whether SiLU follows.
        gated: whether the input is b * x, and the result is multiplied by c.
    """
    channels, width = weight.shape
    rows, tokens = segments.rows, len(out)
    if tokens == 0 or segments.num_prompts == 0:
        return
    kept = segments.kept_slots
    of_tile = GATED_TOKENS if gated else TOKENS
    tiles = tokens // of_tile + segments.num_prompts
    convolve_prompts[triton.cdiv(channels, CHANNELS), tiles](
        x[rows:], weight, weight if bias is None else bias, state, out, segments.cu_seqlens, segments.slots,
        segments.slots if kept is None else kept, rows, segments.num_prompts, x.stride(0), out.stride(0),
        state.stride(0),
        C=channels, W=width, TAPS=taps(width), BIAS=bias is not None, GATED=gated, SILU=silu,
        KEEPS=kept is not None, TOKENS=of_tile, CHANNELS=CHANNELS, SEQS=sequences(segments.num_prompts), num_warps=4,
    )  # fmt: skip
