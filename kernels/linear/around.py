"""The operations around a product: norms and activations, by PyTorch or by one Triton kernel each.

The Triton kernels are imported when they are first called, because Triton is not installed on every host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kernels.linear.weights import Activation, LayerNorm, Norm
from kernels.norms import pytorch

if TYPE_CHECKING:
    from kernels.collective.communicator import Communicator
    from kernels.norms.pytorch import ActivationName


class Vectors(Protocol):
    """Norms and activations of vectors: the modules `kernels.norms.pytorch` and `kernels.norms.cpu_library`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """See `kernels.norms.pytorch.rms_norm`."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, /) -> Tensor:
        """See `kernels.norms.pytorch.layer_norm`."""

    def activate(self, x: Tensor, function: ActivationName, /, *, gated: bool) -> Tensor:
        """See `kernels.norms.pytorch.activate`."""

    def multiply_by_sigmoid(self, x: Tensor, gate: Tensor, /) -> Tensor:
        """See `kernels.norms.pytorch.multiply_by_sigmoid`."""


def normalize(norm: Norm | LayerNorm | None, x: Tensor, by: Vectors) -> Tensor:
    """Normalize x, [..., C], unless there is no norm; differentiable if the functions `by` are."""
    if norm is None:
        return x
    if isinstance(norm, Norm):
        return by.rms_norm(x, norm.weight, norm.eps)
    return by.layer_norm(x, norm.weight, norm.bias, norm.eps)


def activate(activation: Activation | None, x: Tensor, by: Vectors) -> Tensor:
    """Apply an activation to x, [..., F] or [..., 2 * F]; differentiable if the functions `by` are."""
    if activation is None:
        return x
    return by.activate(x, activation.function, gated=activation.gated)


def add_and_normalize(
    norm: Norm | LayerNorm | None,
    hidden: Tensor,
    parts: Tensor | None,
    ranks: Communicator | None = None,
    *,
    pdl: bool,
) -> Tensor:
    """Add partial sums to the residual stream in place and normalize it; ranks exchange them first if they are large.

    Args:
        norm: the norm; None for the residual stream itself.
        hidden: [T, C], contiguous in C; written if there are partial sums.
        parts: [S, T, C] contiguous, float32 or, with `ranks`, the dtype of `hidden`; None for none.
        ranks: have partial sums too, all of which are added; None if these are all.
        pdl: use programmatic dependent launch.
    """
    from kernels.norms.gpu.norm_and_gate import add_layer_norm, add_rms_norm  # noqa: PLC0415 - needs Triton

    if ranks is not None:
        assert parts is not None
        if isinstance(norm, Norm):
            result = ranks.add_and_normalize(parts, hidden, *norm, pdl=pdl)
            if result is not None:
                return result
        parts = ranks.summands(joined(parts, hidden.dtype))
    if norm is None:
        return hidden if parts is None else hidden.add_(pytorch.sum_in_order(parts))
    if isinstance(norm, Norm):
        return add_rms_norm(hidden, *norm, parts=parts, pdl=pdl)
    return add_layer_norm(hidden, *norm, parts=parts, pdl=pdl)


def joined(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Add partial sums, [S, T, C], in their order and round the sum, [T, C], to `dtype`."""
    return (parts[0] if len(parts) == 1 else pytorch.sum_in_order(parts)).to(dtype)


def normalized_part(norm: Norm, y: Tensor, *, pdl: bool) -> Tensor:
    """Normalize y, [T, C], to a partial sum of the residual stream, [1, T, C] float32, in one launch."""
    from kernels.norms.gpu.norm_and_gate import add_rms_norm  # noqa: PLC0415 - needs Triton

    return add_rms_norm(y, *norm, dtype=torch.float32, pdl=pdl)[None]


def activate_on_gpu(activation: Activation, x: Tensor, *, pdl: bool) -> Tensor:
    """Apply an activation to x, [T, F] or [T, 2 * F], in one launch."""
    from kernels.norms.gpu import norm_and_gate  # noqa: PLC0415 - needs Triton

    return norm_and_gate.activate(x, activation.function, gated=activation.gated, pdl=pdl)


def multiply_by_sigmoid_on_gpu(x: Tensor, gate: Tensor, *, pdl: bool) -> Tensor:
    """Multiply x by the sigmoid of its gate, both [T, F], in place and in one launch."""
    from kernels.norms.gpu import output_gate  # noqa: PLC0415 - needs Triton

    return output_gate.multiply_by_sigmoid(x, gate, pdl=pdl)
