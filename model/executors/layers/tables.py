"""The implementation of each kind of mixer, MLP and other sublayer, and the fields that it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kernels.linear.projection import add_both
from model.executors import support
from model.executors.layers.altup import BoundAltUp, BoundLaurel
from model.executors.layers.attention import BoundAttention
from model.executors.layers.contexts import (
    begin_attention,
    begin_both,
    begin_dense_attention,
    begin_dense_both,
    begin_dense_recurrences,
    begin_recurrences,
)
from model.executors.layers.dense import BoundDense
from model.executors.layers.network import MixerSpec, MLPSpec
from model.executors.layers.per_layer import BoundPerLayerInput
from model.executors.layers.recurrent import BoundRecurrent, recurrent_choice
from model.network import spec
from model.network.mixers import GatedDelta, Mamba2, Parallel, ShortConv
from model.network.spec import Attention, Dense
from model.network.sublayers import AltUp, Laurel, PerLayerInput, PerLayerTable, Streams

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.projection import Residual, ResidualWriter
    from model.executors.layers.binder import Binder
    from model.executors.layers.forward import BoundMixer, Contexts


class BothWriters(NamedTuple):
    """Adds the results of two mixers to the residual stream; the `ResidualWriter` of a `BoundParallel`."""

    first: ResidualWriter
    second: ResidualWriter

    def to_residual(self, x: tuple[Tensor, Tensor], residual: Residual) -> Residual:
        """Project the results of both mixers, [T, C] each, and add them."""
        return add_both((self.first, x[0]), (self.second, x[1]), residual)


class BoundParallel(NamedTuple):
    """Mixers beside each other; its context has those of both by the types of bound mixers."""

    first: BoundMixer
    second: BoundMixer

    @classmethod
    def bind(cls, spec: Parallel, binder: Binder) -> BoundParallel:
        """Bind a layer's mixers."""
        first, second = (MIXERS[type(it)].bind(it, binder) for it in spec.mixers)
        return cls(first, second)

    def read(
        self, index: int, residual: Residual, contexts: Contexts
    ) -> tuple[tuple[Tensor, Tensor], Residual]:
        """See `BoundMixer.read`."""
        one, residual = self.first.read(index, residual, contexts[type(self.first)])
        two, residual = self.second.read(index, residual, contexts[type(self.second)])
        return (one, two), residual

    @property
    def output(self) -> BothWriters:
        """See `BoundMixer.output`."""
        return BothWriters(self.first.output, self.second.output)


_FIELDS = (
    "window", "rotary", "qk_norm", "joint_qk_norm", "qk_norm_by_head", "softcap", "late_qk_norm", "query_scale", "bias",
    "output_bias", "gate", "value_norm", "tied_values", "kv_layer",
)  # fmt: skip


def _recurrent(*fields: str) -> MixerSpec:
    """Return the row of a recurrent mixer, which reads all fields without a default and those that are given."""
    return MixerSpec(
        BoundRecurrent.bind,
        begin_recurrences,
        begin_dense_recurrences,
        dict.fromkeys(fields, support.ALL),
        recurrent_choice,
    )


MIXERS: Final[dict[type, MixerSpec]] = {
    Attention: MixerSpec(
        BoundAttention.bind,
        begin_attention,
        begin_dense_attention,
        dict.fromkeys(_FIELDS, support.ALL),
    ),
    ShortConv: _recurrent("bias"),
    GatedDelta: _recurrent(),
    Mamba2: _recurrent(
        "norm_before_gate", "dt_limits", "conv_bias", "bias", "output_bias", "norm_ranks"
    ),
    Parallel: MixerSpec(BoundParallel.bind, begin_both, begin_dense_both, {}),
}
MLPS: Final[dict[type, MLPSpec]] = {
    Dense: MLPSpec(
        BoundDense.bind, dict.fromkeys(("activation", "gated", "bias", "sparsity"), support.ALL)
    )
}
READS: Final[support.Reads] = {
    spec.Network: dict.fromkeys(
        (
            "embedding_factor", "positions", "logit_softcap", "tied", "head_bias", "per_layer",
            "streams",
        ),
        support.ALL,
    ),
    spec.Positions: {"offset": support.ALL},
    spec.Layer: dict.fromkeys(
        (
            "post_norms", "pre_norms", "parallel", "shared_norm", "per_layer", "scaled", "laurel",
            "altup",
        ),
        support.ALL,
    ),
    spec.Norm: {"eps": support.ALL, "kind": {"rms", "layer"}, "float32": support.ALL, "bias": support.ALL},
    spec.Rotary: support.ALL,
    spec.QueryScale: support.ALL,
    PerLayerTable: support.ALL,
    PerLayerInput: support.ALL,
    Laurel: support.ALL,
    AltUp: support.ALL,
    Streams: support.ALL,
}  # fmt: skip
"""What the layer loop computes beside mixers and MLPs, whose fields their tables have."""


OTHERS: Final[dict[str, Any]] = {
    "per_layer": BoundPerLayerInput, "laurel": BoundLaurel, "altup": BoundAltUp
}  # fmt: skip
"""What binds the other sublayers of a layer, by their fields."""
