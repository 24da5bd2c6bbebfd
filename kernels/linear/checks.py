"""Compares the tensors of a linear layer with the problem that its kernel was chosen for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.problem import LinearProblem
    from kernels.linear.select import LinearChoice
    from kernels.linear.weights import LinearArguments, LinearWeights


def check_weights(weights: LinearWeights, problem: LinearProblem) -> None:
    """Reject parameters that a kernel would read out of bounds.

    Args:
        weights: of the layer.
        problem: the layer, with any number of rows.

    Raises:
        ShapeError: a shape or the format differs from the problem.
    """
    weight, bias = weights
    outputs, inputs = problem.matrices * problem.outputs, problem.inputs
    form, scale, shift = problem.format, weight.scale, weight.shift
    columns = inputs if form.bits >= 8 else inputs * form.bits // 8
    scales = form.scale_shape((outputs, inputs))
    fits = (
        weight.format == form
        and weight.shape == (outputs, inputs)
        and weight.numbers.shape == (outputs, columns)
        and str(weight.numbers.dtype) == f"torch.{form.dtype}"
        and (scale.shape if scale is not None else ()) == scales
        and (shift.shape if shift is not None else ()) == (scales if form.shifts else ())
        and all(part.is_contiguous() for part in weight.tensors.values())
        and (bias is None or bias.shape == (outputs,))
    )
    if not fits:
        raise ShapeError(
            f"weight is {list(weight.numbers.shape)} {weight.numbers.dtype}, its scale is "
            f"{None if scale is None else list(scale.shape)}, bias is "
            f"{None if bias is None else list(bias.shape)}; the layer is {problem}"
        )


def check_linear(
    x: Tensor, choice: LinearChoice, out: Tensor | None, arguments: LinearArguments
) -> None:
    """Reject inputs and outputs that a kernel would read or write out of bounds.

    Args:
        x: [rows, C], contiguous in C.
        choice: the kernel and its problem.
        out: [rows, N] contiguous, [rows, 2 * N] where the gate is a separate launch; or None.
        arguments: the operations that the call absorbs.

    Raises:
        ShapeError: a shape differs from the choice's problem.
    """
    problem = choice.problem
    outputs = problem.outputs * (1 if choice.spec.absorbs_gate else problem.matrices)
    shape, best, residual = (problem.rows, outputs), arguments.best, arguments.residual
    fits = (
        x.shape == (problem.rows, problem.inputs)
        and x.stride(1) == 1
        and (out is None or (out.shape == shape and out.is_contiguous()))
        and (residual is None or (residual.shape == shape and residual.stride(1) == 1))
        and (best is None or all(part.shape == (problem.rows, choice.tiles) for part in best))
        and not (problem.gated and (residual is not None or best is not None))
    )
    if not fits:
        raise ShapeError(
            f"x is {list(x.shape)}, out is {None if out is None else list(out.shape)}; the choice is "
            f"{choice.spec.name} for {problem}, with a residual or best only where it is not gated"
        )
