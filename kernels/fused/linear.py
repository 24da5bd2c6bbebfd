"""Linear layers with what surrounds them, on the kernel that was chosen for the number of rows.

    y = epilogue(prologue(x) W^T + bias)    prologue: RMS norm    epilogue: silu(gate) * up, + residual

Both kernels compute the same; the vector kernel rounds once, the library as often as it has launches. Knows
tensors, not layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernels.errors import ShapeError
from kernels.fused.dependent import dependent_launch
from kernels.fused.elementwise import add_rms_norm, silu_and_mul
from kernels.fused.vector_linear import vector_linear
from kernels.linear_plan import LinearKernel

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear_plan import LinearChoice


class Norm(NamedTuple):
    """An RMS norm: weight [K] and what is added to the mean square."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearArguments:
    """What surrounds a linear layer.

    Attributes:
        bias: [N], or [2 * N] where gated; None for none.
        norm: of the input rows; None takes them as they are.
        residual: [rows, N], contiguous in N, added to the output; may be `out`. Not where gated.
        best: [rows, choice.tiles] int64 contiguous, gets the largest key of each tile (see
            `kernels.fused.best_token`); the vector kernel only.
        pdl: launch before the kernel before has ended; from compute capability 9.0 on.
    """

    bias: Tensor | None = None
    norm: Norm | None = None
    residual: Tensor | None = None
    best: Tensor | None = None
    pdl: bool = False


_PLAIN = LinearArguments()


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
        weight: [N, K] contiguous; [2 * N, K], gate above up, where gated.
        choice: from `kernels.linear_plan.select_linear` for these shapes.
        out: [rows, N] contiguous; None where `arguments.best` alone is wanted.
        arguments: what surrounds it.

    Raises:
        ShapeError: a shape differs from the choice's problem.
    """
    _check(x, weight, choice, out, arguments)
    if choice.kernel is LinearKernel.LIBRARY:
        assert out is not None, "_check refuses this"
        _run_library(x, weight, choice, out, arguments)
    else:
        _run_vector(x, weight, choice, out, arguments)


def _check(
    x: Tensor, weight: Tensor, choice: LinearChoice, out: Tensor | None, arguments: LinearArguments
) -> None:
    """Compare the shapes with the choice's problem."""
    problem, best, residual = choice.problem, arguments.best, arguments.residual
    outputs = (problem.rows, problem.outputs)
    fits = (
        x.shape == (problem.rows, problem.inputs)
        and weight.shape == (problem.matrices * problem.outputs, problem.inputs)
        and weight.is_contiguous()
        and x.stride(1) == 1
        and (out is None or (out.shape == outputs and out.is_contiguous()))
        and (residual is None or (residual.shape == outputs and residual.stride(1) == 1))
        and (best is None or best.shape == (problem.rows, choice.tiles))
        and (out is not None or (best is not None and choice.kernel is not LinearKernel.LIBRARY))
        and not (problem.gated and (residual is not None or best is not None))
    )
    if not fits:
        raise ShapeError(
            f"x is {list(x.shape)}, weight is {list(weight.shape)}, out is "
            f"{None if out is None else list(out.shape)}, best is "
            f"{None if best is None else list(best.shape)}; the choice is {choice.kernel.value} for "
            f"{problem}, with a residual or best only where it is not gated"
        )


def _run_library(
    x: Tensor, weight: Tensor, choice: LinearChoice, out: Tensor, arguments: LinearArguments
) -> None:
    """Have the library multiply, between a launch for the norm and one for the gate."""
    if arguments.norm is not None:
        x = add_rms_norm(x, *arguments.norm, pdl=arguments.pdl)
    if choice.problem.gated:
        both = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
        _multiply(x, weight, arguments.bias, None, both)
        silu_and_mul(both, out=out, pdl=arguments.pdl)
    else:
        _multiply(x, weight, arguments.bias, arguments.residual, out)


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


def _run_vector(
    x: Tensor, weight: Tensor, choice: LinearChoice, out: Tensor | None, arguments: LinearArguments
) -> None:
    launch, problem, norm = choice.launch, choice.problem, arguments.norm
    assert launch is not None, "our kernels have a launch"
    residual, best = arguments.residual, arguments.best
    vector_linear[(choice.tiles,)](
        x,
        weight,
        arguments.bias,
        norm.weight if norm else None,
        residual,
        x if out is None else out,
        best,
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
        BIAS=arguments.bias is not None,
        RESIDUAL=residual is not None,
        STORE=out is not None,
        ARGMAX=best is not None,
        num_warps=launch.num_warps,
        **dependent_launch(arguments.pdl),
    )
