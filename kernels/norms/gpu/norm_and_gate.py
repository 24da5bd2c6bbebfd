"""The norms after the addition of partial sums, and the activations of an MLP, one launch each, in Triton.

They are used in steps whose linear layers do not absorb these operations. They compute in float32 and
round where PyTorch's operations round.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch
from kernels.gpu.functions import silu

if TYPE_CHECKING:
    from kernels.norms.pytorch import ActivationName

_GATE_BLOCK = 1024
_HALF_ROOT = tl.constexpr(math.sqrt(0.5))
_TWO_ROOTS = tl.constexpr(2 * math.sqrt(2 / math.pi))


@triton.jit(do_not_specialize=["num_rows"])
def add_norm(
    x, parts, weight, bias, out, x_stride, num_rows, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, LAYER_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add SPLITS partial sums to one row in place, in a fixed order, and normalize the sum; program (row).

    The norm is an RMS norm, or a layer norm with a bias.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < C
    if PDL:
        gdc_launch_dependents()
    factor = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    summand = factor
    if LAYER_NORM:
        summand = tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    place = x + row * x_stride + column
    values = tl.load(place, mask=exists, other=0.0)
    if SPLITS > 0:
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(SPLITS):
            total += tl.load(parts + (i * num_rows + row) * C + column, mask=exists, other=0.0)
        values = (values.to(tl.float32) + total).to(values.dtype)
        tl.store(place, values, mask=exists)
    values = values.to(tl.float32)
    if LAYER_NORM:
        values = tl.where(exists, values - tl.sum(values) / C, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / C + eps)
    result = values * scale * factor
    if LAYER_NORM:
        result += summand
    tl.store(out + row * C + column, result.to(out.dtype.element_ty), mask=exists)


@triton.jit
def gate(
    x, out, x_stride,
    F: tl.constexpr, BLOCK: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of one row of f(x), or of f(gate) * up; program (row, columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < F
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(x + row * x_stride + column, mask=exists, other=0.0).to(tl.float32)
    result = first
    if FUNCTION == "silu":
        result = silu(first)
    elif FUNCTION == "gelu":
        result = 0.5 * first * (1.0 + tl.erf(first * _HALF_ROOT))
    elif FUNCTION == "gelu_tanh":
        # 0.5 (1 + tanh(y)) = sigmoid(2 y)
        angle = _TWO_ROOTS * (first + 0.044715 * first * first * first)
        result = first / (1.0 + tl.exp(-angle))
    else:
        tl.static_assert(FUNCTION == "relu" or FUNCTION == "relu2")
        # Not `maximum`, which drops a NaN.
        result = tl.where(first < 0.0, 0.0, first)
        if FUNCTION == "relu2":
            result = result * result
    if GATED:
        second = tl.load(x + row * x_stride + F + column, mask=exists, other=0.0).to(tl.float32)
        result = result.to(x.dtype.element_ty).to(tl.float32) * second
    tl.store(out + row * F + column, result.to(out.dtype.element_ty), mask=exists)


def add_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    parts: Tensor | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """Add partial sums to `x` in place and normalize the sum; without partial sums, normalize `x`.

    Args:
        x: [T, C], contiguous in C; replaced by the rounded sum.
        weight: [C], in x's dtype or float32.
        eps: added to the mean square.
        parts: [S, T, C] float32 contiguous.
        dtype: of the result; None for x's.
        pdl: use programmatic dependent launch.

    Returns:
        [T, C], a new tensor.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    return _add_and_normalize(x, weight, None, eps, parts, dtype or x.dtype, pdl=pdl)


def add_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    parts: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Add partial sums to `x` in place and compute the layer norm of the sum; arguments as for `add_rms_norm`.

    Source: Ba et al., Layer Normalization, 2016.
    """
    return _add_and_normalize(x, weight, bias, eps, parts, x.dtype, pdl=pdl)


def _add_and_normalize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    parts: Tensor | None,
    dtype: torch.dtype,
    *,
    pdl: bool,
) -> Tensor:
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    block = triton.next_power_of_2(size)
    # With partial sums, which only steps of few rows have, a thread has half as many columns, since it loads each of
    # them once per part.
    columns = 256 if parts is None else 128
    add_norm[(rows,)](
        x, x if parts is None else parts, weight, weight if bias is None else bias, out, x.stride(0), rows,
        eps,
        C=size, BLOCK=block, SPLITS=0 if parts is None else len(parts), LAYER_NORM=bias is not None,
        num_warps=min(16, max(1, block // columns)), **dependent_launch(pdl),
    )  # fmt: skip
    return out


def silu_and_mul(x: Tensor, *, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """Multiply the second half of each row by the SiLU of the first.

    Args:
        x: [T, 2 * F], contiguous in its rows.
        out: [T, F] contiguous; None allocates it.
        pdl: use programmatic dependent launch.

    Returns:
        `out`.

    Source: Shazeer, GLU Variants Improve Transformer, 2020 (SwiGLU).
    """
    return activate(x, "silu", gated=True, out=out, pdl=pdl)


def activate(
    x: Tensor,
    function: ActivationName,
    *,
    gated: bool,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Apply an activation to the elements of each row, or gate them.

    Args:
        x: [T, F], or [T, 2 * F] if gated; contiguous in its rows.
        function: the activation.
        gated: whether to multiply the second half of each row by the activation of the first.
        out: [T, F] contiguous; None allocates it.
        pdl: use programmatic dependent launch.

    Returns:
        `out`.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, for `gelu` and `gelu_tanh`.
    """
    rows, size = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return out
    block = min(_GATE_BLOCK, triton.next_power_of_2(size))
    gate[(rows, triton.cdiv(size, block))](
        x, out, x.stride(0),
        F=size, BLOCK=block, FUNCTION=function, GATED=gated, num_warps=max(1, block // 256),
        **dependent_launch(pdl),
    )  # fmt: skip
    return out
