"""A decoder whose products have quantized weights and activations, computed in float32 from the rounded values.

It has the rounding errors of the CPU's int8 and int4 products and not their speed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch.nn import functional

from kernels.linear.projection import SWIGLU, Activation, FixedProjection, Norm, Operations
from model.decoder import DecoderLM
from model.executors.layers.attention import BoundAttention
from model.executors.layers.dense import BoundDense
from model.executors.layers.forward import BoundLayer
from tests.kernels.references.quantized_reference import (
    ACTIVATION_GROUP,
    dequantize_int8,
    quantize_int4,
    quantize_int8,
    round_activations,
)

if TYPE_CHECKING:
    from torch import Tensor

    from model.network.layers import DecoderLayer


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a matrix and the inputs of its product are rounded.

    Attributes:
        bits: of a weight, 8 or 4.
        group: inputs that share a scale, of weights and of activations.
        activations: whether activations are rounded too.
        by_row: whether the weights have a scale for each output instead.
        refined: whether int4 scales are improved by least squares.
    """

    bits: int
    group: int = ACTIVATION_GROUP
    activations: bool = True
    by_row: bool = False
    refined: bool = True

    def round_weight(self, weight: Tensor) -> Tensor:
        """Quantize and dequantize a matrix [N, C]; returns float32."""
        if self.bits == 8:
            return dequantize_int8(*quantize_int8(weight, None if self.by_row else self.group))
        return quantize_int4(weight, self.group, refined=self.refined).dequantize()

    def round_input(self, x: Tensor) -> Tensor:
        """Quantize and dequantize the inputs [..., C] of a product."""
        return round_activations(x, self.group) if self.activations else x


class QuantizedLM(DecoderLM):
    """A float32 copy of a model on a CPU with rounded weights, whose activations are rounded before each product.

    Norms, biases, attention and the residual stream are not rounded.

    Args:
        model: a float32 model that is not packed.
        layers: how the layers' products are rounded.
        head: how the head's is, and the embedding.
    """

    def __init__(self, model: DecoderLM, layers: Scheme, head: Scheme) -> None:
        super().__init__(model.config)
        self.load_state_dict(model.state_dict())
        self.requires_grad_(requires_grad=False).eval()
        for layer in self.decoder_layers:
            for matrix in layer.matrices.values():
                matrix.numbers.copy_(layers.round_weight(matrix.numbers))
        for table in {id(it.numbers): it.numbers for it in (self.embedding, self.head)}.values():
            table.copy_(head.round_weight(table))
        eps = self.network.norm.eps
        bound = self.executors.layers.bound
        self.executors.layers.bound = bound._replace(
            layers=[
                _bind_layer(layer, it, layers, eps)
                for layer, it in zip(self.decoder_layers, bound.layers, strict=True)
            ],
            head=_project(self.head.numbers, head),
        )


def _bind_layer(layer: DecoderLayer, bound: BoundLayer, scheme: Scheme, eps: float) -> BoundLayer:
    qkv, output, gate_up, down = (it.numbers for it in layer.matrices.values())
    assert isinstance(bound.mixer, BoundAttention)
    norms = [Norm(it, eps) for it in layer.pre_norms]
    mixer = bound.mixer._replace(
        qkv=_project(qkv, scheme, layer.qkv_bias, norms[0]),
        output=_project(output, scheme, layer.output_bias),
    )
    mlp = BoundDense(
        _project(gate_up, scheme, layer.gate_up_bias, norms[1], SWIGLU),
        _project(down, scheme, layer.down_bias),
    )
    return bound._replace(mixer=mixer, mlp=mlp)


def _project(
    weight: Tensor,
    scheme: Scheme,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    activation: Activation | None = None,
) -> FixedProjection:
    def multiply(x: Tensor) -> Tensor:
        return functional.linear(scheme.round_input(x), weight, bias)

    return FixedProjection(multiply, Operations(norm, activation), copies_weights=False)
