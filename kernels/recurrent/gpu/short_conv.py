"""The gated short convolution in Triton: one launch for decode rows, with drafts or not, and one for prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.recurrent.gpu.convolution import causal_conv_of_prompts
from kernels.recurrent.gpu.row_convolution import causal_conv_of_drafts, causal_conv_of_rows
from kernels.recurrent.pytorch import short_conv as pytorch

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.problem import RecurrentWeights, ShortConvShape
    from kernels.recurrent.segments import Segments


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
        channels = self.shape.channels
        (state,) = states
        weight, bias = self.weights.conv, self.weights.conv_bias
        out = torch.empty(
            (len(projected), channels), dtype=projected.dtype, device=projected.device
        )
        if segments.by_token:
            causal_conv_of_drafts(
                projected, self._conv, bias, state, segments, out, gated=True
            )  # fmt: skip
            return out
        if rows := segments.rows:
            causal_conv_of_rows(
                projected[:rows], self._conv, bias, state, segments.slots, out[:rows], gated=True
            )  # fmt: skip
        causal_conv_of_prompts(
            projected, weight, bias, state, segments, out[rows:], silu=False, gated=True
        )
        return out
