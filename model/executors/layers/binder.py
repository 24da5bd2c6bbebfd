"""Binds the products of a layer, with the operations around them, to kernels."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

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
    bind_output_gate,
    bind_projection,
)
from kernels.selection import VectorProblem
from model.executors.parallel import ReducedProjection
from model.network.mixers import GatedDelta, Mamba2, Parallel, ShortConv
from model.network.spec import Attention, Dense
from model.network.spec import Norm as NormSpec
from model.network.sublayers import AltUp, Laurel, PerLayerInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels.collective.communicator import Communicator
    from kernels.weights import Weight
    from model.network.layers import DecoderLayer
    from model.network.parameters import DecoderParameters


class Binder:
    """Binds the products of a layer to kernels.

    Args:
        layer: its parameters. In-place changes to them take effect; replacing them does not.
        model: of the layer.
        purpose: what the layer is for; matrices may be copied unless it is training.

    Attributes:
        bound: the products so far, by the names of their matrices.
    """

    def __init__(self, layer: DecoderLayer, model: DecoderParameters, purpose: Purpose) -> None:
        self.layer, self.model = layer, model
        self._purpose = purpose
        self._projections = projections(layer, model.communicator, trainable=self.is_trainable)
        self._weights = sum(math.prod(it.weight.shape) for it, _ in self._projections.values())
        self.bound: dict[str, ResidualWriter] = {}

    @property
    def is_trainable(self) -> bool:
        """Whether results must be differentiable."""
        return self._purpose is Purpose.TRAINING

    @property
    def _vectors(self) -> VectorProblem:
        return VectorProblem(self.model.dtype_name, self.is_trainable)

    def has(self, name: str) -> bool:
        """Whether a matrix has a product, and is not part of another one's; see `Product.includes`."""
        return name in self._projections

    def reading(self, name: str) -> Projection:
        """Bind a product that reads the residual stream."""
        self.bound[name] = product = self._bind(name)
        return product

    @property
    def included(self) -> dict[str, str]:
        """The matrices that are part of another one's product, by the name of that one; see `Product.includes`."""
        pairs = ((it.name, it.includes) for it in _products(self.layer))
        return {name: it for name, it in pairs if it is not None and not self.has(it)}

    def drop_copied(self) -> None:
        """Delete the matrices of which a product has a copy."""
        included = self.included
        for name, product in self.bound.items():
            if product.copies_weights:
                self.layer.drop_matrix(name)
                if name in included:
                    self.layer.drop_matrix(included[name])

    def _bind(self, name: str) -> Projection:
        weights, operations = self._projections[name]
        return bind_projection(
            weights,
            self.model.dtype,
            self.model.arch,
            operations,
            layer_weights=self._weights,
            purpose=self._purpose,
            rounds_inputs=self.model.rounds_inputs,
        )

    def norm(self, norm: Norm) -> Callable[[Tensor], Tensor]:
        """Bind a norm of vectors, which no product includes."""
        bound = bind_norm(norm, self._vectors, self.model.arch)
        return lambda x: bound(Residual(x))

    def output_gate(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Bind the product of attention's result and the sigmoid of its gate."""
        return bind_output_gate(self._vectors, self.model.arch, self.model.device)

    def adding(self, name: str) -> ResidualWriter:
        """Bind a product that adds to the residual stream."""
        product, communicator = self._bind(name), self.model.communicator
        self.bound[name] = writer = (
            product
            if communicator is None
            else ReducedProjection(
                product,
                getattr(self.layer, f"{name}_bias"),
                _post_norm(self.layer, name),
                communicator,
            )
        )
        return writer


STREAM: Final = ""
"""In place of the name of a norm: a product reads the stream itself."""


class Product(NamedTuple):
    """A product of a layer.

    Attributes:
        name: of its matrix.
        norm: name of the norm of the residual stream that it reads, or `STREAM` for the stream itself; None for a
            product that adds to the stream.
        activation: of its results; None for none.
        includes: name of a matrix that reads the same. If both are stored as one, and not for training, the product's
            outputs are those of the matrix `name`, those of this one, which then has no product, and padding.
    """

    name: str
    norm: str | None = None
    activation: Activation | None = None
    includes: str | None = None


def _of_dense(mlp: Dense) -> tuple[Product, ...]:
    # What has parameters, or needs all outputs, is computed after the product.
    activation = None
    if mlp.activation != "xielu" and not mlp.sparsity:
        activation = Activation(mlp.activation, gated=mlp.gated)
    return Product("gate_up", "mlp_norm", activation), Product("down")


def _of_per_layer_input(part: PerLayerInput) -> tuple[Product, ...]:
    activation = Activation(part.activation, gated=False)
    return Product("per_layer_gate", STREAM, activation), Product("per_layer_output")


PRODUCTS: Final[dict[type, Callable[[Any], tuple[Product, ...]]]] = {
    Attention: lambda _mixer: (Product("qkv", "input_norm"), Product("output")),
    ShortConv: lambda _mixer: (Product("input", "input_norm"), Product("mixed")),
    GatedDelta: lambda _mixer: (
        Product("gates", "input_norm"),
        Product("input", "input_norm", includes="gates"),
        Product("mixed"),
    ),
    Mamba2: lambda _mixer: (Product("input", "input_norm"), Product("mixed")),
    Parallel: lambda mixer: tuple(
        itertools.chain.from_iterable(PRODUCTS[type(it)](it) for it in mixer.mixers)
    ),
    Dense: _of_dense,
    PerLayerInput: _of_per_layer_input,
    Laurel: lambda _part: (Product("laurel_in", STREAM), Product("laurel_out")),
    AltUp: lambda _part: (),
}
"""The products of a sublayer, in the order in which they are computed."""


def _products(layer: DecoderLayer) -> list[Product]:
    return [it for part in layer.spec.parts for it in PRODUCTS[type(part)](part)]


def projections(
    layer: DecoderLayer, communicator: Communicator | None = None, *, trainable: bool = False
) -> dict[str, tuple[LinearWeights, Operations]]:
    """Return the parameters of each product of a rank's layer and the operations around it, in their order.

    Args:
        layer: its parameters.
        communicator: of the ranks; None for one.
        trainable: whether each matrix must have a product; see `Product.includes`.
    """
    products = _products(layer)
    in_one: dict[str, Weight] = {}
    for it in products:
        both = None if trainable or it.includes is None else layer.in_one(it.name, it.includes)
        if both is not None:
            in_one[it.name] = both
    included = {it.includes for it in products if it.name in in_one}

    def weights(name: str) -> LinearWeights:
        weight = in_one.get(name, layer.matrices[name])
        return LinearWeights(weight, getattr(layer, f"{name}_bias"))

    def reading(norm: str, activation: Activation | None = None) -> Operations:
        if norm == STREAM:
            return Operations(None, activation)
        norm = "input_norm" if layer.spec.shared_norm else norm
        weight, bias = getattr(layer, norm), getattr(layer, f"{norm}_bias")
        made = None if weight is None else make_norm(weight, bias, layer.spec.norm)
        return Operations(made, activation)

    def adding(name: str) -> tuple[LinearWeights, Operations]:
        if communicator is None:
            return weights(name), Operations(residual=True, post_norm=_post_norm(layer, name))
        # The bias and the norm are those of the sum over all ranks.
        return weights(name)._replace(bias=None), Operations(residual=communicator.fuses_norm)

    return {
        it.name: adding(it.name)
        if it.norm is None
        else (weights(it.name), reading(it.norm, it.activation))
        for it in products
        if it.name not in included
    }


def make_norm(weight: Tensor, bias: Tensor | None, norm: NormSpec) -> Norm | LayerNorm:
    """Return the norm with a weight; a layer norm without a bias is one with a bias of zeros."""
    if norm.kind == "rms":
        return Norm(weight, norm.eps)
    return LayerNorm(weight, torch.zeros_like(weight) if bias is None else bias, norm.eps)


def _post_norm(layer: DecoderLayer, name: str) -> Norm | None:
    weight = getattr(layer, f"{name}_norm", None)
    return None if weight is None else Norm(weight, layer.spec.norm.eps)
