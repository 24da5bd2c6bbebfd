"""Linear layers with what surrounds them, on the kernel that was chosen for the number of rows.

    y = epilogue(prologue(x) W^T * scale + bias)    prologue: RMS norm    epilogue: silu(gate) * up, + residual

The kernels compute the same; the vector kernel rounds once, the library as often as it has launches, and in FP8 it
quantises the rows too. Knows tensors, not layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernels.attention.quantized_cache import FP8
from kernels.elementwise.gpu.norm_and_gate import add_rms_norm, silu_and_mul
from kernels.elementwise.gpu.quantize_rows import quantise_rows
from kernels.errors import ShapeError
from kernels.fp8 import dequantise_rows
from kernels.gpu.dependent_launch import dependent_launch
from kernels.linear.gpu.vector import vector_linear
from kernels.linear.select import LinearKernel
from kernels.torch_private import multiply_fp8

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.select import LinearChoice


class Norm(NamedTuple):
    """An RMS norm: weight [K] and what is added to the mean square."""

    weight: Tensor
    eps: float


class TileBest(NamedTuple):
    """What a choice of the largest output needs of each tile of outputs, for `kernels.sampling.gpu.best_token`.

    Attributes:
        keys: [rows, tiles] int64 contiguous, the largest key.
        totals: [rows, tiles] float32 contiguous, the sum of exp(output - largest of the tile).
    """

    keys: Tensor
    totals: Tensor

    @classmethod
    def empty(cls, rows: int, tiles: int, device: torch.device | str) -> TileBest:
        """Allocate them."""
        return cls(
            torch.empty((rows, tiles), dtype=torch.int64, device=device),
            torch.empty((rows, tiles), dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearArguments:
    """What surrounds a linear layer.

    Attributes:
        scale: [N] float32, or [2 * N] where gated, what the rows of quantised weights are multiplied by; else None.
        bias: [N], or [2 * N] where gated; None for none.
        norm: of the input rows; None takes them as they are.
        residual: [rows, N], contiguous in N, added to the output; may be `out`. Not where gated.
        best: what gets the best of each tile; the vector kernel only.
        pdl: launch before the kernel before has ended; from compute capability 9.0 on.
    """

    scale: Tensor | None = None
    bias: Tensor | None = None
    norm: Norm | None = None
    residual: Tensor | None = None
    best: TileBest | None = None
    pdl: bool = False


_PLAIN = LinearArguments()
_FP8_DTYPE = getattr(torch, FP8)


def linear(
    x: Tensor,
    weight: Tensor,
    choice: LinearChoice,
    out: Tensor | None,
    arguments: LinearArguments = _PLAIN,
) -> None:
    """Compute a linear layer.

    Args:
        x: [rows, K], contiguous in K.
        weight: [N, K] contiguous; [2 * N, K], gate above up, where gated; of the problem's dtype for weights.
        choice: from `kernels.linear.select.select_linear` for these shapes.
        out: [rows, N] contiguous; None where `arguments.best` alone is wanted.
        arguments: what surrounds it.

    Raises:
        ShapeError: a shape differs from the choice's problem.
    """
    _check(x, weight, choice, out, arguments)
    if choice.kernel is LinearKernel.VECTOR:
        _run_vector(x, weight, choice, out, arguments)
    else:
        assert out is not None, "_check refuses this"
        _run_library(x, weight, choice, out, arguments)


def _check(
    x: Tensor, weight: Tensor, choice: LinearChoice, out: Tensor | None, arguments: LinearArguments
) -> None:
    """Compare the shapes with the choice's problem."""
    problem, best, residual = choice.problem, arguments.best, arguments.residual
    outputs, scale = (problem.rows, problem.outputs), arguments.scale
    fits = (
        x.shape == (problem.rows, problem.inputs)
        and weight.shape == (problem.matrices * problem.outputs, problem.inputs)
        and weight.is_contiguous()
        and (problem.weight_dtype is None) == (scale is None)
        and (scale is None or (scale.shape == weight.shape[:1] and weight.dtype is _FP8_DTYPE))
        and x.stride(1) == 1
        and (out is None or (out.shape == outputs and out.is_contiguous()))
        and (residual is None or (residual.shape == outputs and residual.stride(1) == 1))
        and (best is None or all(part.shape == (problem.rows, choice.tiles) for part in best))
        and (out is not None or (best is not None and choice.kernel is LinearKernel.VECTOR))
        and not (problem.gated and (residual is not None or best is not None))
    )
    if not fits:
        raise ShapeError(
            f"x is {list(x.shape)}, weight is {list(weight.shape)} {weight.dtype}, its scale is "
            f"{None if scale is None else list(scale.shape)}, out is "
            f"{None if out is None else list(out.shape)}, best is "
            f"{None if best is None else list(best.keys.shape)}; the choice is {choice.kernel.value} for "
            f"{problem}, with a residual or best only where it is not gated"
        )


def _run_library(
    x: Tensor, weight: Tensor, choice: LinearChoice, out: Tensor, arguments: LinearArguments
) -> None:
    """Have the library multiply, between a launch for the norm and one for the gate."""
    scale, bias, norm, residual = (
        arguments.scale,
        arguments.bias,
        arguments.norm,
        arguments.residual,
    )
    product = out
    if choice.problem.gated:
        product = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    if choice.kernel is LinearKernel.LIBRARY_FP8:
        assert scale is not None, "_check refuses this"
        numbers, factors = quantise_rows(x, *(norm or (None, 0.0)), pdl=arguments.pdl)
        _multiply_fp8(numbers, factors, weight, scale, bias, residual, product)
    else:
        x = x if norm is None else add_rms_norm(x, *norm, pdl=arguments.pdl)
        weight = weight if scale is None else dequantise_rows(weight, scale, x.dtype)
        _multiply(x, weight, bias, residual, product)
    if choice.problem.gated:
        silu_and_mul(product, out=out, pdl=arguments.pdl)


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> None:
    """Compute x W^T + bias + residual; one of the two is added by the product itself."""
    first = residual if bias is None else bias
    if first is None:
        torch.mm(x, weight.t(), out=out)
        return
    if bias is None or residual is None:
        torch.addmm(first, x, weight.t(), out=out)
        return
    torch.add(torch.addmm(bias, x, weight.t()), residual, out=out)


def _multiply_fp8(
    x: Tensor,
    factors: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """Compute x W^T with both in FP8, [rows, 1] and [N] their scales, + bias + residual."""
    product = out if residual is None else torch.empty_like(out)
    multiply_fp8(x, weight.t(), factors, scale[None], product)
    if bias is not None:
        product += bias
    if residual is not None:
        torch.add(product, residual, out=out)


def _run_vector(
    x: Tensor, weight: Tensor, choice: LinearChoice, out: Tensor | None, arguments: LinearArguments
) -> None:
    launch, problem, norm = choice.launch, choice.problem, arguments.norm
    assert launch is not None, "our kernels have a launch"
    residual, best = arguments.residual, arguments.best
    if choice.unpacks:
        weight = weight.view(torch.uint8)
    vector_linear[(choice.tiles,)](
        x,
        weight,
        arguments.scale,
        arguments.bias,
        norm.weight if norm else None,
        residual,
        x if out is None else out,
        None if best is None else best.keys,
        None if best is None else best.totals,
        problem.rows,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        0 if out is None else out.stride(0),
        norm.eps if norm else 0.0,
        N=problem.outputs,
        K=problem.inputs,
        ROWS=choice.padded_rows,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        AHEAD=launch.ahead,
        GATED=problem.gated,
        NORM=norm is not None,
        SCALED=arguments.scale is not None,
        BIAS=arguments.bias is not None,
        RESIDUAL=residual is not None,
        STORE=out is not None,
        ARGMAX=best is not None,
        num_warps=launch.num_warps,
        **dependent_launch(arguments.pdl),
    )
