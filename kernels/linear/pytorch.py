"""Linear layers in PyTorch: differentiable, on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from kernels.fp8 import dequantize_rows

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.problem import LinearProblem
    from kernels.linear.weights import LinearWeights


class PyTorchLinear:
    """Multiplies by the row-major weights without a copy of them; quantized ones are converted at each call."""

    def __init__(self, weights: LinearWeights, _problem: LinearProblem) -> None:
        self._weight, self._bias, self._scale = weights

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [..., C] to [..., N]."""
        weight = self._weight
        if self._scale is not None:
            weight = dequantize_rows(weight, self._scale, x.dtype)
        return functional.linear(x, weight, self._bias)
