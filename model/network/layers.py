"""One decoder layer: a module that holds the parameters, and a function that computes with bound projections."""

from __future__ import annotations

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
from model.network.parallel import ReducedProjection

if TYPE_CHECKING:
    from kernels import GPUArch
    from kernels.collective.communicator import Communicator
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


class DecoderLayer(nn.Module):
    """The parameters of one layer; `layer_forward` computes with them.

    `qkv` stacks the rows of the q, k and v projections, `gate_up` those of gate and up; without a gate it has only
    those of up. Biases and norms that a family lacks are None. With a
    `weight_dtype` the matrices are quantized, and each has a buffer of scales, such as `qkv_scale`, float32 [rows].
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        def norm(size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=norm_dtype(config, dtype), device=device))

        def matrix(rows: int, columns: int) -> nn.Parameter:
            weight = torch.empty(rows, columns, dtype=weight_dtype or dtype, device=device)
            return nn.Parameter(weight, requires_grad=weight_dtype is None)

        def scale(rows: int) -> Tensor | None:
            return None if weight_dtype is None else nn.Buffer(torch.empty(rows, device=device))

        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim
        stacked = heads + 2 * config.num_kv_heads * config.head_dim
        widened = 2 * inner if config.gated_mlp else inner
        layer_norms = config.norm == "layer"
        self._eps = config.norm_eps
        self._activation = Activation(config.activation, gated=config.gated_mlp)
        self.input_norm = norm(hidden)
        self.input_norm_bias = empty(hidden) if layer_norms else None
        self.qkv = matrix(stacked, hidden)
        self.qkv_scale = scale(stacked)
        self.qkv_bias = empty(stacked) if config.attention_bias else None
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        self.output = matrix(hidden, heads)
        self.output_scale = scale(hidden)
        self.output_bias = empty(hidden) if config.attention_output_bias else None
        self.output_norm = norm(hidden) if config.post_norms else None
        self.mlp_norm = norm(hidden)
        self.mlp_norm_bias = empty(hidden) if layer_norms else None
        self.gate_up = matrix(widened, hidden)
        self.gate_up_scale = scale(widened)
        self.gate_up_bias = empty(widened) if config.mlp_bias else None
        self.down = matrix(hidden, inner)
        self.down_scale = scale(hidden)
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
        matrices = (self.qkv, self.output, self.gate_up, self.down)
        layer_weights = sum(matrix.numel() for matrix in matrices)
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
        if self.q_norm is not None and self.k_norm is not None:
            head_norms = Norm(self.q_norm, self._eps), Norm(self.k_norm, self._eps)
        return BoundLayer(
            qkv=bind("qkv"),
            head_norms=head_norms,
            output=adding("output"),
            gate_up=bind("gate_up"),
            down=adding("down"),
            next_weights=(self.output, self.gate_up),
        )

    def projections(
        self, communicator: Communicator | None = None
    ) -> dict[str, tuple[LinearWeights, Operations]]:
        """Return the parameters of each product of this rank and the operations around it, in their order."""

        def weights(name: str) -> LinearWeights:
            return LinearWeights(*(getattr(self, name + end) for end in ("", "_bias", "_scale")))

        def reading(norm: str, activation: Activation | None = None) -> Operations:
            weight, bias = getattr(self, norm), getattr(self, f"{norm}_bias")
            return Operations(make_norm(weight, bias, self._eps), activation)

        def adding(name: str) -> tuple[LinearWeights, Operations]:
            if communicator is None:
                return weights(name), Operations(residual=True, post_norm=self._post_norm(name))
            # The bias and the norm are those of the sum over all ranks.
            return weights(name)._replace(bias=None), Operations(residual=communicator.fuses_norm)

        return {
            "qkv": (weights("qkv"), reading("input_norm")),
            "output": adding("output"),
            "gate_up": (weights("gate_up"), reading("mlp_norm", self._activation)),
            "down": adding("down"),
        }

    def _post_norm(self, name: str) -> Norm | None:
        weight = getattr(self, f"{name}_norm")
        return None if weight is None else Norm(weight, self._eps)

    def drop_matrices(self) -> None:
        """Delete the matrices, once the bound projections have copies of them."""
        for name in ("qkv", "output", "gate_up", "down"):
            self.drop_matrix(name)

    def drop_matrix(self, name: str) -> None:
        """Delete one matrix, once there is a copy of it."""
        self.register_parameter(name, None)
