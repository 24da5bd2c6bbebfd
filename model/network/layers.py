"""The parameters of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from kernels.stacked import stacked
from kernels.weight_format import WeightFormat
from model.network.matrix import Matrix
from model.network.mixers import GatedDelta, Mamba2, Parallel, ShortConv
from model.network.new_parameters import NewParameters
from model.network.recurrent import add_gated_delta, add_mamba2, add_short_conv
from model.network.spec import Attention, Dense
from model.network.sublayers import AltUp, Laurel, PerLayerInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.weights import Weight
    from model.network.spec import Layer


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

    `qkv` stacks the rows of the q, k and v projections that there are, after those of a gate of the result if there is
    one, `gate_up` those of gate and up; without a gate it has only those of up. `activation` has the two parameters of
    xIELU. Biases and norms that a family lacks are None. `PARAMETERS` has what each kind of part adds.

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
        new = NewParameters(layer, hidden, dtype, device, weight_format)
        biases, own_mlp_norm = layer.norm.has_bias, layer.pre_norms and not layer.shared_norm
        self.spec = layer
        self._dropped: dict[str, WeightFormat] = {}
        self.input_norm = new.norm(hidden) if layer.pre_norms else None
        self.input_norm_bias = new.vector(hidden) if layer.pre_norms and biases else None
        PARAMETERS[type(layer.mixer)](self, layer.mixer, new)
        self.output_norm = new.norm(hidden) if layer.post_norms else None
        self.mlp_norm = new.norm(hidden) if own_mlp_norm else None
        self.mlp_norm_bias = new.vector(hidden) if own_mlp_norm and biases else None
        PARAMETERS[type(layer.mlp)](self, layer.mlp, new)
        self.down_norm = new.norm(hidden) if layer.post_norms else None
        for part in layer.parts[2:]:
            PARAMETERS[type(part)](self, part, new)
        self.scale = new.vector(1) if layer.scaled else None

    def add_attention(self, mixer: Attention, new: NewParameters) -> None:
        """Add the parameters of attention."""
        heads, key_heads = (it * mixer.head_dim for it in (mixer.num_heads, mixer.num_kv_heads))
        stacked, has_keys = sum(mixer.projected), mixer.kv_layer is None
        has_all = mixer.joint_qk_norm or mixer.qk_norm_by_head
        normalized = (heads, key_heads) if has_all else (mixer.head_dim,) * 2
        self.qkv = new.matrix("qkv", stacked, new.hidden)
        self.qkv_bias = new.vector(stacked) if mixer.bias else None
        self.q_norm = new.norm(normalized[0], mixer.qk_norm) if mixer.qk_norm else None
        self.k_norm = new.norm(normalized[1], mixer.qk_norm) if mixer.qk_norm and has_keys else None
        self.output = new.matrix("output", new.hidden, heads)
        self.output_bias = new.vector(new.hidden) if mixer.output_bias else None

    def add_parallel(self, mixer: Parallel, new: NewParameters) -> None:
        """Add the parameters of mixers beside each other."""
        for it in mixer.mixers:
            PARAMETERS[type(it)](self, it, new)

    def add_dense(self, mlp: Dense, new: NewParameters) -> None:
        """Add the parameters of a dense MLP."""
        widened = 2 * mlp.inner if mlp.gated else mlp.inner
        self.gate_up = new.matrix("gate_up", widened, new.hidden)
        self.gate_up_bias = new.vector(widened) if mlp.bias else None
        self.activation = new.vector(mlp.num_activation) if mlp.num_activation else None
        self.down = new.matrix("down", new.hidden, mlp.inner)
        self.down_bias = new.vector(new.hidden) if mlp.bias else None

    def add_per_layer_input(self, part: PerLayerInput, new: NewParameters) -> None:
        """Add the parameters of per-layer inputs."""
        self.per_layer_gate = new.matrix("per_layer_gate", part.size, new.hidden)
        self.per_layer_output = new.matrix("per_layer_output", new.hidden, part.size)
        self.per_layer_gate_bias = self.per_layer_output_bias = None
        self.per_layer_output_norm = new.norm(new.hidden)

    def add_laurel(self, part: Laurel, new: NewParameters) -> None:
        """Add the parameters of LAuReL."""
        self.laurel_in = new.matrix("laurel_in", part.rank, new.hidden)
        self.laurel_out = new.matrix("laurel_out", new.hidden, part.rank)
        self.laurel_in_bias = self.laurel_out_bias = None
        self.laurel_out_norm = new.norm(new.hidden)

    def add_altup(self, part: AltUp, new: NewParameters) -> None:
        """Add the parameters of AltUp: of the router, of the coefficients, and the scale of the active stream."""
        count = part.count
        self.altup_norm = new.norm(new.hidden)
        self.altup_router = new.full(count, new.hidden)
        self.altup_predict = new.full(count * count, count)
        self.altup_correct = new.full(count, count)
        self.altup_scale = new.vector(new.hidden)

    @property
    def matrices(self) -> dict[str, Weight]:
        """The matrices by their names."""
        return {name: it.weight for name, it in self.named_children() if isinstance(it, Matrix)}

    def in_one(self, first: str, second: str) -> Weight | None:
        """Return the matrix of which two are the rows, see `kernels.stacked`; None if they are not stored as one."""
        matrices = self.matrices
        return stacked(matrices[first], matrices[second])

    @property
    def pre_norms(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The norms before mixer and MLP, of a layer that has both."""
        assert self.input_norm is not None
        assert self.mlp_norm is not None
        return self.input_norm, self.mlp_norm

    @property
    def formats(self) -> dict[str, WeightFormat]:
        """The formats of the matrices by their names, also of those that are deleted."""
        return {name: it.format for name, it in self.matrices.items()} | self._dropped

    def drop_matrix(self, name: str) -> None:
        """Delete one matrix, once there is a copy of it."""
        self._dropped[name] = self.matrices[name].format
        setattr(self, name, None)


PARAMETERS: Final[dict[type, Callable[[DecoderLayer, Any, NewParameters], None]]] = {
    Attention: DecoderLayer.add_attention,
    ShortConv: add_short_conv,
    GatedDelta: add_gated_delta,
    Mamba2: add_mamba2,
    Parallel: DecoderLayer.add_parallel,
    Dense: DecoderLayer.add_dense,
    PerLayerInput: DecoderLayer.add_per_layer_input,
    Laurel: DecoderLayer.add_laurel,
    AltUp: DecoderLayer.add_altup,
}
"""Adds the parameters of a sublayer to a layer."""
