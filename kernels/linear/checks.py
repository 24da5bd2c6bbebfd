"""Compares the tensors of a linear layer with the problem that its kernel was chosen for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.select import LinearChoice
    from kernels.linear.weights import LinearArguments, LinearWeights


def check_linear(
    x: Tensor,
    weights: LinearWeights,
    choice: LinearChoice,
    out: Tensor | None,
    arguments: LinearArguments,
) -> None:
    """Reject tensors that a kernel would read or write out of bounds.

    Args:
        x: [rows, C], contiguous in C.
        weights: of the layer.
        choice: the kernel and its problem.
        out: [rows, N] contiguous, [rows, 2 * N] where the gate is a separate launch; or None.
        arguments: the operations that the call absorbs.

    Raises:
        ShapeError: a shape differs from the choice's problem.
    """
    problem, (weight, bias, scale) = choice.problem, weights
    outputs = problem.outputs if choice.spec.absorbs_gate else len(weight)
    shape, best, residual = (problem.rows, outputs), arguments.best, arguments.residual
    fits = (
        x.shape == (problem.rows, problem.inputs)
        and x.stride(1) == 1
        and weight.shape == (problem.matrices * problem.outputs, problem.inputs)
        and weight.is_contiguous()
        and (problem.weight_dtype is None) == (scale is None)
        and str(weight.dtype) == f"torch.{problem.weight_dtype or problem.dtype}"
        and all(part is None or part.shape == weight.shape[:1] for part in (bias, scale))
        and (out is None or (out.shape == shape and out.is_contiguous()))
        and (residual is None or (residual.shape == shape and residual.stride(1) == 1))
        and (best is None or all(part.shape == (problem.rows, choice.tiles) for part in best))
        and not (problem.gated and (residual is not None or best is not None))
    )
    if not fits:
        raise ShapeError(
            f"x is {list(x.shape)}, weight is {list(weight.shape)} {weight.dtype}, its scale is "
            f"{None if scale is None else list(scale.shape)}, out is {None if out is None else list(out.shape)}; "
            f"the choice is {choice.spec.name} for {problem}, with a residual or best only where it is not gated"
        )
