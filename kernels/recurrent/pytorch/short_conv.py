"""The gated short convolution in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kernels.recurrent.pytorch.convolution import causal_conv, dense_conv

if TYPE_CHECKING:
    from kernels.recurrent.problem import RecurrentWeights, ShortConvShape
    from kernels.recurrent.segments import Segments


class ShortConv:
    """See `RecurrentKernel` and `kernels.recurrent.problem.ShortConvShape`."""

    def __init__(self, shape: ShortConvShape, weights: RecurrentWeights) -> None:
        self.shape, self.weights = shape, weights

    def __call__(
        self,
        projected: Tensor,
        _gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
    ) -> Tensor:
        """Compute the tokens of a step, [T, channels]; see `RecurrentKernel`."""
        b, c, x = projected.float().chunk(3, -1)
        weights = self.weights
        found = causal_conv(b * x, weights.conv, weights.conv_bias, states[0], segments, silu=False)
        return (c * found).to(projected.dtype)

    def dense(self, projected: Tensor, _gates: Tensor | None = None) -> Tensor:
        """Compute whole sequences from zero states, differentiably: [B, L, channels] of [B, L, 3 * channels]."""
        b, c, x = projected.float().chunk(3, -1)
        found = dense_conv(b * x, self.weights.conv, self.weights.conv_bias, silu=False)
        return (c * found).to(projected.dtype)
