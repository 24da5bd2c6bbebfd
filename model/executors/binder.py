"""Binds the products of a layer, with the operations around them, to kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernels.linear.projection import (
    Activation,
    LayerNorm,
    LinearWeights,
    Norm,
    Operations,
    Projection,
    Purpose,
    Residual,
    ResidualWriter,
    bind_norm,
    bind_projection,
)
from kernels.selection import VectorProblem
from model.executors.parallel import ReducedProjection
from model.network.spec import Dense

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels.collective.communicator import Communicator
    from model.network.layers import DecoderLayer
    from model.network.parameters import DecoderParameters


class Binder:
    """Binds the products of a layer to kernels.

    Args:
        layer: its parameters. In-place changes to them take effect; replacing them does not.
        model: of the layer.
        purpose: what the layer is for; matrices may be copied unless it is training.
    """

    def __init__(self, layer: DecoderLayer, model: DecoderParameters, purpose: Purpose) -> None:
        self.layer, self.model = layer, model
        self._purpose = purpose
        self._weights = sum(math.prod(matrix.shape) for matrix in layer.matrices.values())
        self._projections = projections(layer, model.communicator)

    def reading(self, name: str) -> Projection:
        """Bind a product that reads the residual stream."""
        weights, operations = self._projections[name]
        return bind_projection(
            weights,
            self.model.embed_tokens.dtype,
            self.model.arch,
            operations,
            layer_weights=self._weights,
            purpose=self._purpose,
        )

    def norm(self, norm: Norm) -> Callable[[Tensor], Tensor]:
        """Bind a norm of vectors, which no product includes."""
        problem = VectorProblem(self.model.dtype_name, self._purpose is Purpose.TRAINING)
        bound = bind_norm(norm, problem, self.model.arch)
        return lambda x: bound(Residual(x))

    def adding(self, name: str) -> ResidualWriter:
        """Bind a product that adds to the residual stream."""
        product, communicator = self.reading(name), self.model.communicator
        if communicator is None:
            return product
        bias = getattr(self.layer, f"{name}_bias")
        return ReducedProjection(product, bias, _post_norm(self.layer, name), communicator)


def projections(
    layer: DecoderLayer, communicator: Communicator | None = None
) -> dict[str, tuple[LinearWeights, Operations]]:
    """Return the parameters of each product of a rank's layer and the operations around it, in their order."""
    mlp = layer.spec.mlp

    def weights(name: str) -> LinearWeights:
        return LinearWeights(layer.matrices[name], getattr(layer, f"{name}_bias"))

    def reading(norm: str, activation: Activation | None = None) -> Operations:
        weight, bias = getattr(layer, norm), getattr(layer, f"{norm}_bias")
        made = None if weight is None else make_norm(weight, bias, layer.spec.norm.eps)
        return Operations(made, activation)

    def adding(name: str) -> tuple[LinearWeights, Operations]:
        if communicator is None:
            return weights(name), Operations(residual=True, post_norm=_post_norm(layer, name))
        # The bias and the norm are those of the sum over all ranks.
        return weights(name)._replace(bias=None), Operations(residual=communicator.fuses_norm)

    found: dict[str, tuple[LinearWeights, Operations]] = {}
    if hasattr(layer, "qkv"):
        found["qkv"] = weights("qkv"), reading("input_norm")
    if hasattr(layer, "output"):
        found["output"] = adding("output")
    if isinstance(mlp, Dense):
        activation = Activation(mlp.activation, gated=mlp.gated)
        found["gate_up"] = weights("gate_up"), reading("mlp_norm", activation)
        found["down"] = adding("down")
    return found


def make_norm(weight: Tensor, bias: Tensor | None, eps: float) -> Norm | LayerNorm:
    """Return the RMS norm with a weight, or the layer norm with a weight and a bias."""
    return Norm(weight, eps) if bias is None else LayerNorm(weight, bias, eps)


def _post_norm(layer: DecoderLayer, name: str) -> Norm | None:
    weight = getattr(layer, f"{name}_norm")
    return None if weight is None else Norm(weight, layer.spec.norm.eps)
