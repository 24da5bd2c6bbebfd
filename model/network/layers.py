"""One decoder layer: a module that holds the parameters, and a function that computes with bound projections."""

from __future__ import annotations

import functools
import itertools
import math
from types import MappingProxyType
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
    from model.checkpoint.config import ModelConfig


class BoundLayer(NamedTuple):
    """One layer's projections, bound to the kernels that compute them.

    Attributes:
        qkv: includes the layer's first norm; reads the residual stream.
        head_norms: per-head norms of queries and of keys; None if the family has none.
        output: adds to the residual stream, after a norm if the family has one there.
        gate_up: includes the MLP's norm and activation; reads the residual stream.
        down: adds to the residual stream, after a norm if the family has one there.
        next_weights: the matrices that are read after attention, in that order.
    """

    qkv: Projection
    head_norms: tuple[Norm, Norm] | None
    output: ResidualWriter
    gate_up: Projection
    down: ResidualWriter
    next_weights: tuple[Tensor, Tensor]


class Attention(Protocol):
    """The attention of one layer."""

    def __call__(self, index: int, layer: BoundLayer, qkv: Tensor) -> Tensor:
        """Compute attention from the QKV projection.

        Args:
            index: the layer's index.
            layer: provides the per-head norms.
            qkv: [..., (H + 2 * K) * D]; may be overwritten.

        Returns:
            [..., H * D].
        """


def norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the weights of norms in a model of dtype `dtype`.

    A sum of 1 and a stored weight would be rounded by up to 2^-9 in bfloat16, so it is held in float32.
    """
    return torch.float32 if config.norms_add_one else dtype


def make_norm(weight: Tensor, bias: Tensor | None, eps: float) -> Norm | LayerNorm:
    """Return the RMS norm with a weight, or the layer norm with a weight and a bias."""
    return Norm(weight, eps) if bias is None else LayerNorm(weight, bias, eps)


def layer_forward(
    index: int, layer: BoundLayer, residual: Residual, attention: Attention
) -> Residual:
    """Compute one layer: attention, then MLP. Each reads the normalized residual stream and adds its result to it."""
    qkv, residual = layer.qkv.from_residual(residual)
    residual = layer.output.to_residual(attention(index, layer, qkv), residual)
    gated, residual = layer.gate_up.from_residual(residual)
    return layer.down.to_residual(gated, residual)


def stacked_rows(config: ModelConfig, parameter: str) -> list[int] | None:
    """Return the rows of each projection that a parameter of a layer stacks; None if it holds only one."""
    if parameter.startswith("qkv"):
        key_rows = config.num_kv_heads * config.head_dim
        return [config.num_heads * config.head_dim, key_rows, key_rows]
    if parameter.startswith("gate_up") and config.gated_mlp:
        return [config.intermediate_size, config.intermediate_size]
    return None


def layer_formats(
    config: ModelConfig, weight_format: WeightFormat | Mapping[str, WeightFormat] | None, index: int
) -> dict[str, WeightFormat]:
    """Return the formats of a layer's matrices by their names; those that are not named have full numbers.

    Args:
        config: the model's configuration.
        weight_format: as for `DecoderLM`.
        index: of the layer.
    """
    if weight_format is None:
        return {}
    if not isinstance(weight_format, WeightFormat):
        prefix = f"layers.{index}."
        return {
            name.removeprefix(prefix): form
            for name, form in weight_format.items()
            if name.startswith(prefix)
        }
    return {
        name: weight_format.divided(
            0, *itertools.accumulate((stacked_rows(config, name) or [])[:-1])
        )
        for name in ("qkv", "output", "gate_up", "down")
    }


class DecoderLayer(nn.Module):
    """The parameters of one layer; `layer_forward` computes with them.

    `qkv` stacks the rows of the q, k and v projections, `gate_up` those of gate and up; without a gate it has only
    those of up. Biases and norms that a family lacks are None.

    Args:
        config: the model's configuration.
        dtype: of the parameters.
        device: of the parameters.
        formats: of the matrices, by their names; those that are not named have full numbers of `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        formats: Mapping[str, WeightFormat] = MappingProxyType({}),
    ) -> None:
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        def norm(size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=norm_dtype(config, dtype), device=device))

        def matrix(name: str, rows: int, columns: int) -> Matrix:
            form = formats.get(name) or unquantized(dtype)
            return Matrix(form, (rows, columns), device)

        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim
        stacked = heads + 2 * config.num_kv_heads * config.head_dim
        widened = 2 * inner if config.gated_mlp else inner
        layer_norms = config.norm == "layer"
        self._eps = config.norm_eps
        self._activation = Activation(config.activation, gated=config.gated_mlp)
        self.input_norm = norm(hidden)
        self.input_norm_bias = empty(hidden) if layer_norms else None
        self.qkv = matrix("qkv", stacked, hidden)
        self.qkv_bias = empty(stacked) if config.attention_bias else None
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        self.output = matrix("output", hidden, heads)
        self.output_bias = empty(hidden) if config.attention_output_bias else None
        self.output_norm = norm(hidden) if config.post_norms else None
        self.mlp_norm = norm(hidden)
        self.mlp_norm_bias = empty(hidden) if layer_norms else None
        self.gate_up = matrix("gate_up", widened, hidden)
        self.gate_up_bias = empty(widened) if config.mlp_bias else None
        self.down = matrix("down", hidden, inner)
        self.down_bias = empty(hidden) if config.mlp_bias else None
        self.down_norm = norm(hidden) if config.post_norms else None

    def bind(
        self,
        arch: GPUArch,
        dtype: torch.dtype,
        purpose: Purpose,
        communicator: Communicator | None = None,
    ) -> BoundLayer:
        """Bind the parameters to kernels. In-place changes to the parameters take effect; replacing them does not.

        Args:
            arch: architecture of the parameters' device.
            dtype: of the activations.
            purpose: what the layer is for; matrices may be copied unless it is training.
            communicator: of the ranks that share the layer; None for one that is whole.
        """
        eps = self._eps
        layer_weights = sum(math.prod(matrix.shape) for matrix in self.matrices.values())

        bind = functools.partial(
            bind_projection, dtype=dtype, arch=arch, layer_weights=layer_weights, purpose=purpose
        )

        def weights(name: str) -> LinearWeights:
            return LinearWeights(self.matrices[name], getattr(self, f"{name}_bias"))

        def adding(name: str, post_norm: Tensor | None) -> ResidualWriter:
            after = None if post_norm is None else Norm(post_norm, eps)
            numbers = weights(name)
            if communicator is None:
                return bind(numbers, operations=Operations(residual=True, post_norm=after))
            operations = Operations(residual=communicator.fuses_norm)
            product = bind(numbers._replace(bias=None), operations=operations)
            return ReducedProjection(product, numbers.bias, after, communicator)

        head_norms = None
        if self.q_norm is not None and self.k_norm is not None:
            head_norms = Norm(self.q_norm, eps), Norm(self.k_norm, eps)
        return BoundLayer(
            qkv=bind(
                weights("qkv"),
                operations=Operations(make_norm(self.input_norm, self.input_norm_bias, eps)),
            ),
            head_norms=head_norms,
            output=adding("output", self.output_norm),
            gate_up=bind(
                weights("gate_up"),
                operations=Operations(
                    make_norm(self.mlp_norm, self.mlp_norm_bias, eps), self._activation
                ),
            ),
            down=adding("down", self.down_norm),
            next_weights=(self.output.numbers, self.gate_up.numbers),
        )

    @property
    def matrices(self) -> dict[str, Weight]:
        """The matrices by their names."""
        return {name: it.weight for name, it in self.named_children() if isinstance(it, Matrix)}

    def drop_matrix(self, name: str) -> None:
        """Delete one matrix, once there is a copy of it."""
        setattr(self, name, None)
