"""The gated short convolution in Triton: one launch for decode rows and one for prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from kernels.recurrent.gpu.convolution import causal_conv_of_prompts
from kernels.recurrent.gpu.row_convolution import convolve_row, load_row, store_inputs
from kernels.recurrent.pytorch import short_conv as pytorch

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.problem import RecurrentWeights, ShortConvShape
    from kernels.recurrent.segments import Segments

_CHANNELS: Final = 256
"""Of a program for a decode row."""


@triton.jit
def step_short_conv(
    x, conv, bias, state, out, slots, x_stride, state_stride,
    C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute some channels of one decode row; program (channels, row).

    Args:
        x: [R, b | c | x].
        conv: [W, C].
        bias: [C], where BIAS.
        state: [S, W - 1, C] float32, slots at any distance.
        out: [R, C].
        slots: [R, 2].
    """
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < C
    read = tl.load(slots + 2 * row).to(tl.int64)
    write = tl.load(slots + 2 * row + 1).to(tl.int64)
    x += row * x_stride
    before, after = state + read * state_stride, state + write * state_stride
    inputs, factors, added = load_row(
        x, conv, bias, before, read >= 0, channel, exists, C, W, TAPS, BIAS, GATED=True
    )
    c = tl.load(x + C + channel, mask=exists, other=0.0).to(tl.float32)
    total = c * convolve_row(inputs, factors, added)
    tl.store(out + row * C + channel, total.to(out.dtype.element_ty), mask=exists)
    # All threads have read the state.
    tl.debug_barrier()
    store_inputs(after, inputs, channel, exists & (write >= 0), C, W, TAPS)


class ShortConv(pytorch.ShortConv):
    """See `RecurrentKernel`: a token's bits depend on its sequence alone. PyTorch computes whole sequences."""

    def __init__(self, shape: ShortConvShape, weights: RecurrentWeights) -> None:
        super().__init__(shape, weights)
        self._conv = weights.conv.t().contiguous()

    def __call__(
        self,
        projected: Tensor,
        _gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
    ) -> Tensor:
        """Compute the tokens of a step, [T, channels]; see `RecurrentKernel`."""
        channels, width = self.shape.channels, self.shape.width
        (state,) = states
        weight, bias = self.weights.conv, self.weights.conv_bias
        out = torch.empty(
            (len(projected), channels), dtype=projected.dtype, device=projected.device
        )
        if rows := segments.rows:
            step_short_conv[triton.cdiv(channels, _CHANNELS), rows](
                projected, self._conv, self._conv if bias is None else bias, state, out, segments.slots,
                projected.stride(0), state.stride(0),
                C=channels, W=width, TAPS=triton.next_power_of_2(width), BIAS=bias is not None, CHANNELS=_CHANNELS,
                num_warps=4,
            )  # fmt: skip
        causal_conv_of_prompts(
            projected, weight, bias, state, segments, out[rows:], silu=False, gated=True
        )
        return out
