"""Linear layers on a CPU, with the weights in the blocked layout of oneDNN or FBGEMM.

A step with few tokens is bound by reading weights, so their layout in memory decides its speed. Time in ms for all
matrices of the bundled model with float32 activations, on two cores of an AMD EPYC (Zen 5):

    rows of the step                    1      8     64
    row-major, general multiplication   2.97   4.47  -
    float32 in oneDNN's layout          0.89   1.32  4.0
    float16 in FBGEMM's layout          0.49   0.71  3.7

docs/decisions/0004-cpu-dtype.md has more.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kernels.arch import has_bfloat16_gemm
from kernels.torch_private import fbgemm_half_linear, onednn_linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.linear.problem import LinearProblem
    from kernels.linear.weights import LinearWeights

_HALF_ERROR: Final = 2.0**-20


def unsupported(dtype: str) -> tuple[str, ...]:
    """List why weights of a dtype cannot be packed on this CPU; empty if they can."""
    tests = (
        (platform.machine().lower() not in ("x86_64", "amd64"), "packed on x86-64 only"),
        (not torch.backends.mkldnn.is_available(), "PyTorch has no oneDNN here"),  # type: ignore[no-untyped-call]
        (dtype not in ("float32", "bfloat16"), f"no {dtype}"),
        (dtype == "bfloat16" and not has_bfloat16_gemm(), "no bfloat16 products on this CPU"),
    )
    return tuple(reason for fails, reason in tests if fails)


class PackedLinear:
    """Multiplies by a copy of the weights in a blocked layout; not differentiable.

    Float32 weights that float16 can hold, such as those of a bfloat16 checkpoint, are stored as float16; activations
    and sums stay float32, so the result is that of float32 weights.
    """

    def __init__(self, weights: LinearWeights, _problem: LinearProblem) -> None:
        weight, bias = weights
        self._multiply: Callable[[Tensor], Tensor] = _packed(weight.numbers.detach(), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [..., C] to [..., N]."""
        return self._multiply(x)


def _packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if weight.dtype is torch.float32 and fits_half(weight):
        return fbgemm_half_linear(weight, bias)
    return onednn_linear(weight, bias)


def fits_half(weight: Tensor) -> bool:
    """Whether float16 holds a float32 weight so exactly that float32 sums do not show the difference.

    bfloat16 has fewer digits than float16 but more range: bfloat16 numbers below 2^-17 lose digits.
    An error of 2^-20 of the largest weight is below the rounding error of a sum over a row.
    """
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    error = (weight - weight.half().float()).abs().max()
    return bool(error <= _HALF_ERROR * weight.abs().max())
