"""A network bound to kernels, what its mixers read in a step, and the rows of the tables of parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kernels.linear.projection import Residual
from model.executors.layers.per_layer import BoundPerLayerInput

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor

    from kernels.recurrent.registry import RecurrentSpec
    from kernels.recurrent.segments import Segments
    from kernels.selection import Choice, VectorSpec
    from model.device.kv_cache import KVCache
    from model.executors.head import Head
    from model.executors.layers.altup import BoundStreams
    from model.executors.layers.attention_plans import AttentionMetadata
    from model.executors.layers.binder import Binder
    from model.executors.layers.forward import BoundLayer, BoundMixer, BoundMLP, Contexts
    from model.executors.layers.per_layer import BoundTable
    from model.executors.step import StepInput
    from model.network.parameters import DecoderParameters
    from model.network.spec import Attention


class PagedStep(NamedTuple):
    """What the mixers of a step read.

    Attributes:
        step: its input; None where the caller has planned attention, in `metadata`.
        state: keys and values, and what else mixers keep; written.
        positions: [T] int64.
        bound: the model's kernels.
        deterministic: see `Bucket`.
        metadata: the plans of attention, if `step` is None.
        segments: of recurrent mixers, if `step` is None.
        only_wanted: whether layers that write nothing compute only the tokens whose logits are wanted.
    """

    step: StepInput | None
    state: KVCache
    positions: Tensor
    bound: BoundNetwork
    deterministic: bool
    metadata: AttentionMetadata | None = None
    segments: Segments | None = None
    only_wanted: bool = False


class MixerSpec(NamedTuple):
    """The implementation of a kind of mixer.

    Attributes:
        bind: binds the mixer of a layer.
        begin: returns the context of a step over a state, once for all layers.
        begin_dense: the same for whole sequences without a state, [B, L, C] at positions [L]; differentiable.
        reads: the entry of its type in `READS`.
        choice: `recurrent_choice` of a mixer with such a kernel; None for any other.
    """

    bind: Callable[[Any, Binder], BoundMixer]
    begin: Callable[[DecoderParameters, PagedStep], Any]
    begin_dense: Callable[[DecoderParameters, Tensor, Tensor], Any]
    reads: Mapping[str, Collection[Any] | None]
    choice: Callable[..., Choice[RecurrentSpec]] | None = None


class MLPSpec(NamedTuple):
    """The implementation of a kind of MLP; attributes as of a `MixerSpec`."""

    bind: Callable[[Any, Binder], BoundMLP]
    reads: Mapping[str, Collection[Any] | None]


class BoundNetwork(NamedTuple):
    """The kernels of a model.

    Attributes:
        layers: the layers in order.
        kinds: of mixers among them, by the type of the bound mixer.
        attentions: from `attention_problems`.
        norm: the final norm.
        head: the projection to the vocabulary.
        table: what tokens are for each layer; None for nothing.
        streams: how several streams begin and end; None for one stream.
        rotation: the row of `kernels.rope.registry` that the layers take.
        pdl: whether its kernel may start before the previous one ends (programmatic dependent launch).
    """

    layers: list[BoundLayer]
    kinds: dict[type, MixerSpec]
    attentions: tuple[Attention, ...]
    norm: Callable[[Residual], Tensor]
    head: Head
    rotation: VectorSpec
    pdl: bool
    table: BoundTable | None = None
    streams: BoundStreams | None = None

    def begin(
        self,
        contexts: Contexts,
        ids: Tensor,
        sampled: Tensor | None,
        hidden: Tensor,
    ) -> Residual:
        """Return what the first layer reads, and add to the contexts what depends on the tokens alone.

        Args:
            contexts: of the step; written.
            ids: [...] int64, or -1 - i for the token `sampled[i]`.
            sampled: [R] int64; None where no id is below 0.
            hidden: [..., C], embeddings.
        """
        if self.table is not None:
            contexts[BoundPerLayerInput] = self.table.of(ids, sampled, hidden)
        return Residual(hidden if self.streams is None else self.streams.split(hidden))

    def end(self, residual: Residual) -> Tensor:
        """Return the hidden states after the last norm, [..., C]."""
        if self.streams is not None:
            residual = Residual(self.streams.joined(residual.hidden))
        return self.norm(residual)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows for which projection kernels are compiled; empty if PyTorch computes the projections."""
        products = (it for layer in self.layers for it in layer.projections.values())
        counts = {it.row_counts for it in products}
        return tuple(sorted({rows for it in (*counts, self.head.row_counts) for rows in it}))
