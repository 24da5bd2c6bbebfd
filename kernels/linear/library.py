"""Linear layers on a GPU by PyTorch's matrix products (cuBLAS), in the activations' dtype or in FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.linear.checks import check_linear, check_weights
from kernels.linear.gpu.dequantize import dequantize
from kernels.norms.gpu.quantize_rows import quantize_rows
from kernels.torch_private import multiply_fp8

if TYPE_CHECKING:
    from kernels.linear.problem import LinearProblem
    from kernels.linear.select import LinearChoice
    from kernels.linear.weights import LinearArguments, LinearWeights


class LibraryLinear:
    """The vendor library's product; weights in other formats than the inputs' dtype are converted at each call."""

    def __init__(self, weights: LinearWeights, problem: LinearProblem) -> None:
        check_weights(weights, problem)
        self._weight, self._bias = weights
        self._numbers = None if problem.format.is_quantized else self._weight.numbers

    def __call__(
        self, x: Tensor, choice: LinearChoice, out: Tensor | None, arguments: LinearArguments
    ) -> Tensor:
        """Compute x W^T + bias + residual, shapes as for `VectorLinear`."""
        assert arguments.norm is None
        assert arguments.best is None
        check_linear(x, choice, out, arguments)
        bias, residual = self._bias, arguments.residual
        weight = self._numbers
        if weight is None:
            weight = dequantize(self._weight, x.dtype, unpacks=choice.unpacks)
        if out is None:
            out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
        first = residual if bias is None else bias
        if first is None:
            return torch.mm(x, weight.t(), out=out)
        if bias is None or residual is None:
            return torch.addmm(first, x, weight.t(), out=out)
        return torch.add(torch.addmm(bias, x, weight.t()), residual, out=out)


class LibraryFP8Linear:
    """The vendor library's product of FP8 weights and FP8 rows."""

    def __init__(self, weights: LinearWeights, problem: LinearProblem) -> None:
        check_weights(weights, problem)
        weight, self._bias = weights
        assert weight.scale is not None, "for quantized weights"
        self._numbers, self._scale = weight.numbers, weight.scale[None]

    def __call__(
        self, x: Tensor, choice: LinearChoice, out: Tensor | None, arguments: LinearArguments
    ) -> Tensor:
        """Quantize norm(x), or x without a norm, multiply and add the residual; shapes as for `VectorLinear`."""
        check_linear(x, choice, out, arguments)
        norm, residual, best, pdl = arguments
        assert best is None
        numbers, factors = quantize_rows(x, *(norm or (None, 0.0)), pdl=pdl)
        if out is None:
            out = torch.empty((len(x), len(self._numbers)), dtype=x.dtype, device=x.device)
        product = out if residual is None else torch.empty_like(out)
        multiply_fp8(numbers, self._numbers.t(), factors, self._scale, product)
        if self._bias is not None:
            product += self._bias
        if residual is not None:
            torch.add(product, residual, out=out)
        return out
