"""One decoder layer: its parameters as a module, its computation as functions of tensors.

The functions take a plain tuple, because looking a parameter up on a module costs 0.3 us and calling
a module 1 us: 20 us a layer, a tenth of a small model's step on the CPU.
Knows nothing of caches or plans: attention comes in as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from kernels import apply_rope, rms_norm, silu_and_mul
from model.checkpoint.config import ModelConfig
from model.network.linear import Linear, packed_linear, plain_linear, quantised_linear

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [..., H, D], k [..., K, D], v [..., K, D]) -> [..., H, D]; q, k, v contiguous in D."""


class LayerOps(NamedTuple):
    """One layer's weights, the matrices bound to their multiplication (see `model.network.linear`)."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LayerShape(NamedTuple):
    """The numbers of a layer's computation, the same for all layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


class DecoderLayer(nn.Module):
    """Holds one layer's parameters; `layer_forward` computes with them.

    `qkv` stacks the rows of the q, k and v projections, `gate_up` those of gate and up. Biases and
    norms that a family does not have are None. Matrices of a `weight_dtype` of their own are quantised:
    each has a buffer beside it, `qkv_scale` and so on, float32 [rows].
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

        def matrix(rows: int, columns: int) -> nn.Parameter:
            weight = torch.empty(rows, columns, dtype=weight_dtype or dtype, device=device)
            return nn.Parameter(weight, requires_grad=weight_dtype is None)

        def scale(rows: int) -> Tensor | None:
            return None if weight_dtype is None else nn.Buffer(torch.empty(rows, device=device))

        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim
        stacked = heads + 2 * config.num_kv_heads * config.head_dim
        self.input_norm = empty(hidden)
        self.qkv = matrix(stacked, hidden)
        self.qkv_scale = scale(stacked)
        self.qkv_bias = empty(stacked) if config.attention_bias else None
        self.q_norm = empty(config.head_dim) if config.qk_norm else None
        self.k_norm = empty(config.head_dim) if config.qk_norm else None
        self.output = matrix(hidden, heads)
        self.output_scale = scale(hidden)
        self.output_bias = empty(hidden) if config.attention_output_bias else None
        self.mlp_norm = empty(hidden)
        self.gate_up = matrix(2 * inner, hidden)
        self.gate_up_scale = scale(2 * inner)
        self.gate_up_bias = empty(2 * inner) if config.mlp_bias else None
        self.down = matrix(hidden, inner)
        self.down_scale = scale(hidden)
        self.down_bias = empty(hidden) if config.mlp_bias else None

    def ops(self, bind: Callable[[Tensor, Tensor | None], Linear] = plain_linear) -> LayerOps:
        """Bind the parameters; plain ones stay valid while the parameters are changed in place."""

        def linear(weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Linear:
            return bind(weight, bias) if scale is None else quantised_linear(weight, bias, scale)

        return LayerOps(
            input_norm=self.input_norm,
            qkv=linear(self.qkv, self.qkv_bias, self.qkv_scale),
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            output=linear(self.output, self.output_bias, self.output_scale),
            mlp_norm=self.mlp_norm,
            gate_up=linear(self.gate_up, self.gate_up_bias, self.gate_up_scale),
            down=linear(self.down, self.down_bias, self.down_scale),
        )

    def pack(self) -> LayerOps:
        """Bind copies of the matrices in the CPU's layout and give up the originals."""
        packed = self.ops(packed_linear)
        for name in ("qkv", "output", "gate_up", "down"):
            self.register_parameter(name, None)
        return packed


def layer_forward(
    layer: int,
    ops: LayerOps,
    shape: LayerShape,
    hidden: Tensor,
    rope: tuple[Tensor, Tensor],
    attend: Attend,
) -> Tensor:
    """Compute one layer: attention and MLP, each on the normalised input and added to it.

    Args:
        layer: index, handed to `attend`.
        ops: of this layer.
        shape: of all layers.
        hidden: [..., hidden_size].
        rope: cos and sin as `kernels.apply_rope` takes them.
        attend: the attention.

    Returns:
        [..., hidden_size], a new tensor.
    """
    q, k, v = _qkv(ops, shape, rms_norm(hidden, ops.input_norm, shape.eps), rope)
    hidden = hidden + ops.output(attend(layer, q, k, v).flatten(-2))
    gated = silu_and_mul(ops.gate_up(rms_norm(hidden, ops.mlp_norm, shape.eps)))
    return hidden + ops.down(gated)


def _qkv(
    ops: LayerOps, shape: LayerShape, normed: Tensor, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Project, normalise per head where the family does, and rotate queries and keys together."""
    num_heads, num_kv_heads, head_dim, eps = shape
    projected = ops.qkv(normed)
    projected = projected.view(*projected.shape[:-1], num_heads + 2 * num_kv_heads, head_dim)
    rotating, v = torch.split(projected, [num_heads + num_kv_heads, num_kv_heads], -2)
    if ops.q_norm is not None and ops.k_norm is not None:
        q, k = torch.split(rotating, [num_heads, num_kv_heads], -2)
        q, k = rms_norm(q, ops.q_norm, eps), rms_norm(k, ops.k_norm, eps)
        rotating = torch.cat((q, k), -2)
    q, k = torch.split(apply_rope(rotating, *rope), [num_heads, num_kv_heads], -2)
    return q, k, v
