"""Linear layers in PyTorch: differentiable, on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.problem import LinearProblem
    from kernels.linear.weights import LinearWeights


class PyTorchLinear:
    """Multiplies by the row-major weights without a copy of them; those in other formats are converted at each call."""

    def __init__(self, weights: LinearWeights, problem: LinearProblem) -> None:
        self._weight, self._bias = weights
        self._numbers = None if problem.format.is_quantized else self._weight.numbers

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [..., C] to [..., N]."""
        weight = self._numbers
        if weight is None:
            weight = self._weight.dequantize(x.dtype)
        return functional.linear(x, weight, self._bias)
