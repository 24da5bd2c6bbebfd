"""One decoder layer: a module that holds the parameters, and a function that computes with bound projections."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

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
    bind_projection,
)
from kernels.weight_format import WeightFormat, unquantized
from model.network.matrix import Matrix
from model.network.parallel import ReducedProjection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels import GPUArch
    from kernels.collective.communicator import Communicator
    from kernels.weights import Weight
    from model.network.spec import Attention, Layer
    from model.network.spec import Norm as NormSpec


class BoundLayer(NamedTuple):
    """One layer's projections, bound to the kernels that compute them.

    Attributes:
        mixer: what the layer's attention computes, of this rank's heads.
        qkv: includes the layer's first norm; reads the residual stream.
        head_norms: per-head norms of queries and of keys; None if the family has none.
        output: adds to the residual stream, after a norm if the family has one there.
        gate_up: includes the MLP's norm and activation; reads the residual stream.
        down: adds to the residual stream, after a norm if the family has one there.
        next_weights: the matrices that are read after attention, in that order.
        problem: index of the attention's problem in `AttentionPlanner.mixers`.
        rotary: index of its rotary embedding in `rotaries`.
    """

    mixer: Attention
    qkv: Projection
    head_norms: tuple[Norm, Norm] | None
    output: ResidualWriter
    gate_up: Projection
    down: ResidualWriter
    next_weights: tuple[Tensor, Tensor]
    problem: int = 0
    rotary: int = 0


class Attend(Protocol):
    """The attention of one layer."""

    def __call__(self, index: int, layer: BoundLayer, qkv: Tensor) -> Tensor:
        """Compute attention from the QKV projection.

        Args:
            index: the layer's index.
            layer: the layer.
            qkv: [..., (H + 2 * K) * D]; may be overwritten.

        Returns:
            [..., H * D].
        """


def norm_dtype(norm: NormSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the weight of a norm in a model of dtype `dtype`."""
    return torch.float32 if norm.float32 else dtype


def make_norm(weight: Tensor, bias: Tensor | None, eps: float) -> Norm | LayerNorm:
    """Return the RMS norm with a weight, or the layer norm with a weight and a bias."""
    return Norm(weight, eps) if bias is None else LayerNorm(weight, bias, eps)


def layer_forward(index: int, layer: BoundLayer, residual: Residual, attention: Attend) -> Residual:
    """Compute one layer: attention, then MLP. Each reads the normalized residual stream and adds its result to it."""
    qkv, residual = layer.qkv.from_residual(residual)
    residual = layer.output.to_residual(attention(index, layer, qkv), residual)
    gated, residual = layer.gate_up.from_residual(residual)
    return layer.down.to_residual(gated, residual)


def stacked_rows(layer: Layer, parameter: str) -> list[int] | None:
    """Return the rows of each projection that a parameter of a layer stacks; None if it holds only one."""
    mixer, mlp = layer.mixer, layer.mlp
    if parameter.startswith("qkv"):
        key_rows = mixer.num_kv_heads * mixer.head_dim
        return [mixer.num_heads * mixer.head_dim, key_rows, key_rows]
    if parameter.startswith("gate_up") and mlp.gated:
        return [mlp.inner, mlp.inner]
    return None


def layer_formats(
    weight_format: WeightFormat | Mapping[str, WeightFormat] | None, index: int
) -> WeightFormat | Mapping[str, WeightFormat] | None:
    """Return the argument of a `DecoderLayer` from that of `DecoderLM`."""
    if weight_format is None or isinstance(weight_format, WeightFormat):
        return weight_format
    prefix = f"layers.{index}."
    return {
        name.removeprefix(prefix): form
        for name, form in weight_format.items()
        if name.startswith(prefix)
    }


class DecoderLayer(nn.Module):
    """The parameters of one layer; `layer_forward` computes with them.

    `qkv` stacks the rows of the q, k and v projections, `gate_up` those of gate and up; without a gate it has only
    those of up. Biases and norms that a family lacks are None.

    Args:
        layer: what the layer computes.
        hidden: C.
        dtype: of the parameters.
        device: of the parameters.
        weight_format: of the matrices; a mapping has those of matrices by their names, of which others have full
            numbers; None for full numbers.

    Attributes:
        spec: what the layer computes.
    """

    def __init__(
        self,
        layer: Layer,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightFormat | Mapping[str, WeightFormat] | None = None,
    ) -> None:
        super().__init__()
        mixer, mlp = layer.mixer, layer.mlp

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        def norm(size: int, of: NormSpec = layer.norm) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=norm_dtype(of, dtype), device=device))

        def matrix(name: str, rows: int, columns: int) -> Matrix:
            if isinstance(weight_format, WeightFormat):
                stacked = stacked_rows(layer, name) or [rows]
                form = weight_format.divided(0, *itertools.accumulate(stacked[:-1]))
            else:
                form = (weight_format or {}).get(name) or unquantized(dtype)
            return Matrix(form, (rows, columns), device)

        inner, heads = mlp.inner, mixer.num_heads * mixer.head_dim
        stacked = heads + 2 * mixer.num_kv_heads * mixer.head_dim
        widened = 2 * inner if mlp.gated else inner
        layer_norms = layer.norm.kind == "layer"
        self.spec = layer
        self.input_norm = norm(hidden)
        self.input_norm_bias = empty(hidden) if layer_norms else None
        self.qkv = matrix("qkv", stacked, hidden)
        self.qkv_bias = empty(stacked) if mixer.bias else None
        self.q_norm = norm(mixer.head_dim, mixer.qk_norm) if mixer.qk_norm else None
        self.k_norm = norm(mixer.head_dim, mixer.qk_norm) if mixer.qk_norm else None
        self.output = matrix("output", hidden, heads)
        self.output_bias = empty(hidden) if mixer.output_bias else None
        self.output_norm = norm(hidden) if layer.post_norms else None
        self.mlp_norm = norm(hidden)
        self.mlp_norm_bias = empty(hidden) if layer_norms else None
        self.gate_up = matrix("gate_up", widened, hidden)
        self.gate_up_bias = empty(widened) if mlp.bias else None
        self.down = matrix("down", hidden, inner)
        self.down_bias = empty(hidden) if mlp.bias else None
        self.down_norm = norm(hidden) if layer.post_norms else None

    def bind(
        self,
        arch: GPUArch,
        dtype: torch.dtype,
        purpose: Purpose,
        communicator: Communicator | None = None,
        problem: int = 0,
        rotary: int = 0,
    ) -> BoundLayer:
        """Bind the parameters to kernels. In-place changes to the parameters take effect; replacing them does not.

        Args:
            arch: architecture of the parameters' device.
            dtype: of the activations.
            purpose: what the layer is for; matrices may be copied unless it is training.
            communicator: of the ranks that share the layer; None for one that is whole.
            problem: see `BoundLayer`.
            rotary: see `BoundLayer`.
        """
        mixer = self.spec.mixer
        layer_weights = sum(math.prod(matrix.shape) for matrix in self.matrices.values())
        projections = self.projections(communicator)

        def bind(name: str) -> Projection:
            weights, operations = projections[name]
            return bind_projection(
                weights, dtype, arch, operations, layer_weights=layer_weights, purpose=purpose
            )

        def adding(name: str) -> ResidualWriter:
            product = bind(name)
            if communicator is None:
                return product
            bias = getattr(self, f"{name}_bias")
            return ReducedProjection(product, bias, self._post_norm(name), communicator)

        head_norms = None
        if mixer.qk_norm is not None:
            assert self.q_norm is not None
            assert self.k_norm is not None
            head_norms = Norm(self.q_norm, mixer.qk_norm.eps), Norm(self.k_norm, mixer.qk_norm.eps)
        return BoundLayer(
            mixer=mixer,
            qkv=bind("qkv"),
            head_norms=head_norms,
            output=adding("output"),
            gate_up=bind("gate_up"),
            down=adding("down"),
            next_weights=(self.output.numbers, self.gate_up.numbers),
            problem=problem,
            rotary=rotary,
        )

    def projections(
        self, communicator: Communicator | None = None
    ) -> dict[str, tuple[LinearWeights, Operations]]:
        """Return the parameters of each product of this rank and the operations around it, in their order."""
        mlp = self.spec.mlp

        def weights(name: str) -> LinearWeights:
            return LinearWeights(self.matrices[name], getattr(self, f"{name}_bias"))

        def reading(norm: str, activation: Activation | None = None) -> Operations:
            weight, bias = getattr(self, norm), getattr(self, f"{norm}_bias")
            return Operations(make_norm(weight, bias, self.spec.norm.eps), activation)

        def adding(name: str) -> tuple[LinearWeights, Operations]:
            if communicator is None:
                return weights(name), Operations(residual=True, post_norm=self._post_norm(name))
            # The bias and the norm are those of the sum over all ranks.
            return weights(name)._replace(bias=None), Operations(residual=communicator.fuses_norm)

        activation = Activation(mlp.activation, gated=mlp.gated)
        return {
            "qkv": (weights("qkv"), reading("input_norm")),
            "output": adding("output"),
            "gate_up": (weights("gate_up"), reading("mlp_norm", activation)),
            "down": adding("down"),
        }

    def _post_norm(self, name: str) -> Norm | None:
        weight = getattr(self, f"{name}_norm")
        return None if weight is None else Norm(weight, self.spec.norm.eps)

    @property
    def matrices(self) -> dict[str, Weight]:
        """The matrices by their names."""
        return {name: it.weight for name, it in self.named_children() if isinstance(it, Matrix)}

    def drop_matrix(self, name: str) -> None:
        """Delete one matrix, once there is a copy of it."""
        setattr(self, name, None)
