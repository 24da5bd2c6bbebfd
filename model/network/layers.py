"""The parameters of a decoder layer."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import nn

from kernels.weight_format import WeightFormat, unquantized
from model.network.matrix import Matrix

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.weights import Weight
    from model.network.spec import Layer
    from model.network.spec import Norm as NormSpec


def norm_dtype(norm: NormSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the weight of a norm in a model of dtype `dtype`."""
    return torch.float32 if norm.float32 else dtype


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
    """The parameters of one layer; executors compute with them.

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
        key_heads = mixer.num_kv_heads * mixer.head_dim
        stacked = heads + 2 * key_heads
        normalized = (heads, key_heads) if mixer.joint_qk_norm else (mixer.head_dim,) * 2
        widened = 2 * inner if mlp.gated else inner
        layer_norms = layer.norm.kind == "layer" and layer.pre_norms
        self.spec = layer
        self.input_norm = norm(hidden) if layer.pre_norms else None
        self.input_norm_bias = empty(hidden) if layer_norms else None
        self.qkv = matrix("qkv", stacked, hidden)
        self.qkv_bias = empty(stacked) if mixer.bias else None
        self.q_norm = norm(normalized[0], mixer.qk_norm) if mixer.qk_norm else None
        self.k_norm = norm(normalized[1], mixer.qk_norm) if mixer.qk_norm else None
        self.output = matrix("output", hidden, heads)
        self.output_bias = empty(hidden) if mixer.output_bias else None
        self.output_norm = norm(hidden) if layer.post_norms else None
        self.mlp_norm = norm(hidden) if layer.pre_norms else None
        self.mlp_norm_bias = empty(hidden) if layer_norms else None
        self.gate_up = matrix("gate_up", widened, hidden)
        self.gate_up_bias = empty(widened) if mlp.bias else None
        self.down = matrix("down", hidden, inner)
        self.down_bias = empty(hidden) if mlp.bias else None
        self.down_norm = norm(hidden) if layer.post_norms else None

    @property
    def matrices(self) -> dict[str, Weight]:
        """The matrices by their names."""
        return {name: it.weight for name, it in self.named_children() if isinstance(it, Matrix)}

    @property
    def pre_norms(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The norms before mixer and MLP, of a layer that has them."""
        assert self.input_norm is not None
        assert self.mlp_norm is not None
        return self.input_norm, self.mlp_norm

    def drop_matrix(self, name: str) -> None:
        """Delete one matrix, once there is a copy of it."""
        setattr(self, name, None)
