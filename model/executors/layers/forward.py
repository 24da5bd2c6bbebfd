"""A layer as bound sublayers, and what it computes from the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from kernels.linear.lora import LoraLinear
from kernels.linear.projection import Residual, add_both, settled
from model.executors.layers.altup import add_laurel
from model.executors.layers.per_layer import BoundPerLayerInput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from kernels.linear.lora import LoraWeights, StepLora
    from kernels.linear.projection import ResidualWriter
    from model.executors.layers.altup import BoundAltUp, BoundLaurel


class BoundMixer(Protocol):
    """A mixer with the projections around it, bound to the kernels that compute them."""

    def read(self, index: int, residual: Residual, context: Any, /) -> tuple[Any, Residual]:  # noqa: ANN401 - of its kind
        """Mix what the normalized residual stream has.

        Args:
            index: the layer's index.
            residual: the stream.
            context: what the mixers of this kind have in common in a step, from the table.

        Returns:
            What `output` reads, and the residual stream with its partial sums added.
        """

    @property
    def output(self) -> Any:  # noqa: ANN401 - of its kind
        """Adds the mixer's result to the residual stream: a `ResidualWriter` of what `read` returns."""


class BoundMLP(Protocol):
    """An MLP, bound to the kernels that compute it."""

    def read(self, residual: Residual, /) -> tuple[Tensor, Residual]:
        """Compute what `down` reads from the normalized residual stream; returns as `BoundMixer.read`."""

    @property
    def down(self) -> ResidualWriter:
        """Adds the MLP's result to the residual stream."""


Contexts: TypeAlias = dict[type, Any]
"""The context of each kind of bound mixer in a step, and of other sublayers."""
RunLayers: TypeAlias = "Callable[[Sequence[BoundLayer], Residual, Contexts], Residual]"


class BoundLayer(NamedTuple):
    """The sublayers of a layer.

    Attributes:
        mixer: the first half.
        mlp: the second half.
        projections: their products, by the names of the matrices.
        parallel: whether both read the same residual stream.
        included: matrices whose outputs follow those of another one in its product, by the name of that one.
        per_layer: adds what tokens are for the layer, after the two halves; None for none.
        scale: [1], multiplies the stream at the end; None for none.
        laurel: beside the mixer of a layer with `altup`; None for none.
        altup: what is done with several streams; None for one stream.
    """

    mixer: BoundMixer
    mlp: BoundMLP
    projections: dict[str, ResidualWriter]
    parallel: bool
    included: Mapping[str, str]
    per_layer: BoundPerLayerInput | None = None
    scale: Tensor | None = None
    laurel: BoundLaurel | None = None
    altup: BoundAltUp | None = None

    def adapted(self, matrices: Mapping[str, LoraWeights], step: StepLora) -> BoundLayer:
        """Return the layer with the adapters of the step's rows; `matrices` has the slots by the names of matrices."""
        products = {}
        for name, product in self.projections.items():
            weights = matrices[name]
            products[name] = product.adapted(LoraLinear(weights, step))
            if name in self.included:
                other = LoraLinear(matrices[self.included[name]], step, sum(weights.parts))
                products[name] = products[name].adapted(other)
        return self._replace(
            mixer=_with_products(self.mixer, products),
            mlp=_with_products(self.mlp, products),
            projections=products,
            per_layer=_with_products(self.per_layer, products),
            laurel=_with_products(self.laurel, products),
        )


def _with_products(part: Any, products: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any field of a sublayer
    """Return a bound sublayer with its products replaced by those of the same names, also those of mixers in it."""
    if not hasattr(part, "_fields"):
        return part
    fields = zip(part._fields, part, strict=True)
    return part._replace(
        **{name: products.get(name) or _with_products(it, products) for name, it in fields}
    )


def layer_forward(
    index: int, layer: BoundLayer, residual: Residual, contexts: Contexts
) -> Residual:
    """Compute one layer: mixer and MLP read the normalized residual stream and add their results to it."""
    if layer.altup is not None:
        return Residual(_altup_forward(index, layer, layer.altup, residual.hidden, contexts))
    residual = _halves_forward(index, layer, residual, contexts)
    if layer.per_layer is not None:
        inputs: Tensor = contexts[BoundPerLayerInput]
        residual = layer.per_layer.to_residual(residual, inputs[index])
    if layer.scale is not None:
        residual = Residual(settled(residual) * layer.scale)
    return residual


def _altup_forward(
    index: int, layer: BoundLayer, altup: BoundAltUp, streams: Tensor, contexts: Contexts
) -> Tensor:
    """Compute one layer of several streams, [A, ..., C]."""
    predicted = altup.predicted(streams)
    # A copy, because products may add to it in place.
    residual = Residual(predicted[altup.spec.active].clone())
    beside = None if layer.laurel is None else layer.laurel.result(residual.hidden)
    mixed, residual = layer.mixer.read(index, residual, contexts[type(layer.mixer)])
    residual = layer.mixer.output.to_residual(mixed, residual)
    if beside is not None:
        residual = Residual(add_laurel(settled(residual), beside))
    widened, residual = layer.mlp.read(residual)
    streams = altup.corrected(predicted, settled(layer.mlp.down.to_residual(widened, residual)))
    per_layer = layer.per_layer
    if per_layer is None:
        return streams
    inputs = contexts[BoundPerLayerInput][index]
    return altup.with_inputs(streams, lambda it: per_layer.to_residual(it, inputs))


def _halves_forward(
    index: int, layer: BoundLayer, residual: Residual, contexts: Contexts
) -> Residual:
    mixer, mlp = layer.mixer, layer.mlp
    mixed, residual = mixer.read(index, residual, contexts[type(mixer)])
    if layer.parallel:
        # Before the mixer's result is written, because that may be in place.
        widened, residual = mlp.read(residual)
        return add_both((mixer.output, mixed), (mlp.down, widened), residual)
    widened, residual = mlp.read(mixer.output.to_residual(mixed, residual))
    return mlp.down.to_residual(widened, residual)


def run_layers(
    layers: Sequence[BoundLayer], residual: Residual, contexts: Contexts, first: int = 0
) -> Residual:
    """Compute layers, of which the first one has the index `first`; see `layer_forward`."""
    for index, layer in enumerate(layers, first):
        residual = layer_forward(index, layer, residual, contexts)
    return residual
