"""Linear layers in PyTorch: differentiable, on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.problem import LinearProblem
    from kernels.linear.weights import LinearWeights
    from kernels.weights import Weight

_CPU_PIECE: Final = 1 << 19
"""Weights that are converted at once on a CPU: 2 MiB as float32, which a cache holds. One row times 16384 x 2048 in
8 bits takes 10 ms of one core of an AMD EPYC (Zen 4), in one piece 73."""
_GPU_PIECE: Final = 1 << 26
_FEWEST_ROWS: Final = 64


class PyTorchLinear:
    """Multiplies by the row-major weights without a copy of them.

    Those in other formats are converted at each call, some outputs at a time.
    """

    def __init__(self, weights: LinearWeights, problem: LinearProblem) -> None:
        self._weight, self._bias = weights
        is_converted = problem.format.is_quantized or problem.in_place
        self._pieces = _pieces(self._weight) if is_converted else []

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [..., C] to [..., N]."""
        if not self._pieces:
            return functional.linear(x, self._weight.numbers, self._bias)
        products = [functional.linear(x, it.dequantize(x.dtype)) for it in self._pieces]
        whole = products[0] if len(products) == 1 else torch.cat(products, -1)
        return whole if self._bias is None else whole + self._bias


def _pieces(weight: Weight) -> list[Weight]:
    """Return the outputs of a matrix in their order, some at a time, as views."""
    outputs, inputs = weight.shape
    most = _CPU_PIECE if weight.numbers.device.type == "cpu" else _GPU_PIECE
    unit = weight.format.group if weight.format.scales == "block" else 1
    count = -(-max(most // inputs, _FEWEST_ROWS) // unit) * unit
    return [weight.rows(start, min(start + count, outputs)) for start in range(0, outputs, count)]
