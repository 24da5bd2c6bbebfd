"""The executor of every network and processor: computes a step layer by layer.

What a layer computes follows from its parts: the tables `MIXERS` and `MLPS` have the implementation of each kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from torch.nn import functional

from kernels.gpu.dependent_launch import may_depend
from kernels.linear.lora import LoraLinear, StepLora
from kernels.linear.projection import (
    LinearWeights,
    Projection,
    Purpose,
    Residual,
    ResidualWriter,
    add_both,
    bind_norm,
    bind_projection,
    settled,
)
from kernels.norms.pytorch import activate, sparse_gate, xielu
from kernels.rope import registry as rope
from kernels.selection import VectorProblem, reasons, select_vector
from model.executors.attention import Attend, BoundAttention, DenseAttention, PagedAttention
from model.executors.attention_plans import AttentionPlanner
from model.executors.binder import Binder, make_norm
from model.executors.columns import ADAPTER, Want
from model.executors.embedding import finish_embeddings, token_embeddings
from model.executors.executor import ExecutorOfState, ExecutorSpec
from model.executors.head import Head, SoftcappedHead
from model.executors.parallel import GatheredHead
from model.executors.scores import prompt_scores
from model.executors.step import StepOutput, lora_rows, wanted_rows
from model.executors.sublayers.altup import BoundAltUp, BoundLaurel, BoundStreams, add_laurel
from model.executors.sublayers.per_layer import BoundPerLayerInput, BoundTable
from model.network import spec
from model.network.attention_problems import attention_problems
from model.network.matrix import Matrix
from model.network.spec import Attention, Dense
from model.network.sublayers import AltUp, Laurel, PerLayerInput, PerLayerTable, Streams

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.lora import LoraWeights
    from kernels.selection import VectorSpec
    from model.device.kv_cache import KVCache
    from model.executors.attention_plans import AttentionMetadata
    from model.executors.columns import Bucket
    from model.executors.executor import Bindings, ModelProblem
    from model.executors.step import StepInput
    from model.network.parameters import DecoderParameters

_logger = logging.getLogger(__name__)


class BoundMixer(Protocol):
    """A mixer with the projections around it, bound to the kernels that compute them."""

    def read(self, index: int, residual: Residual, context: Any, /) -> tuple[Tensor, Residual]:  # noqa: ANN401 - of its kind
        """Mix what the normalized residual stream has.

        Args:
            index: the layer's index.
            residual: the stream.
            context: what the mixers of this kind have in common in a step, from the table.

        Returns:
            What `output` reads, and the residual stream with its partial sums added.
        """

    @property
    def output(self) -> ResidualWriter:
        """Adds the mixer's result to the residual stream."""


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
        per_layer: adds what tokens are for the layer, after the two halves; None for none.
        scale: [1], multiplies the stream at the end; None for none.
        laurel: beside the mixer of a layer with `altup`; None for none.
        altup: what is done with several streams; None for one stream.
    """

    mixer: BoundMixer
    mlp: BoundMLP
    projections: dict[str, ResidualWriter]
    parallel: bool
    per_layer: BoundPerLayerInput | None = None
    scale: Tensor | None = None
    laurel: BoundLaurel | None = None
    altup: BoundAltUp | None = None

    def adapted(self, matrices: Mapping[str, LoraWeights], step: StepLora) -> BoundLayer:
        """Return the layer with the adapters of the step's rows; `matrices` has the slots by the names of matrices."""
        products: dict[str, Any] = {
            name: product.adapted(LoraLinear(matrices[name], step))
            for name, product in self.projections.items()
        }

        def replaced(part: Any) -> Any:  # noqa: ANN401 - a named tuple of bound products and others
            if part is None:
                return None
            return part._replace(**{it: products[it] for it in part._fields if it in products})

        return self._replace(
            mixer=replaced(self.mixer),
            mlp=replaced(self.mlp),
            projections=products,
            per_layer=replaced(self.per_layer),
            laurel=replaced(self.laurel),
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


class BoundDense(NamedTuple):
    """A multi-layer perceptron.

    Attributes:
        gate_up: includes the MLP's norm and, unless it is computed apart, its activation; reads the residual stream.
        down: adds to the residual stream, after a norm if the family has one there.
        activation: parameters of xIELU; None for an activation without parameters.
        sparse: name of the activation of a sparse gate, and the multiple of `sparse_gate`; None for any other.
    """

    gate_up: Projection
    down: ResidualWriter
    activation: Tensor | None = None
    sparse: tuple[Any, float] | None = None

    @classmethod
    def bind(cls, spec: Dense, binder: Binder) -> BoundDense:
        """Bind a layer's MLP."""
        sparse = None
        if spec.sparsity:
            sparse = spec.activation, NormalDist().inv_cdf(spec.sparsity)
        return cls(
            binder.reading("gate_up"), binder.adding("down"), binder.layer.activation, sparse
        )

    def read(self, residual: Residual) -> tuple[Tensor, Residual]:
        """See `BoundMLP.read`."""
        gated, residual = self.gate_up.from_residual(residual)
        if self.activation is not None:
            gated = xielu(gated, self.activation)
        if self.sparse is not None:
            function, multiplier = self.sparse
            gate, up = gated.chunk(2, -1)
            gated = activate(sparse_gate(gate, multiplier), function, gated=False) * up
        return gated, residual


class PagedStep(NamedTuple):
    """What the mixers of a step read.

    Attributes:
        step: its input; None where the caller has planned attention, in `metadata`.
        state: keys and values, and what else mixers keep; written.
        positions: [T] int64.
        bound: the model's kernels.
        deterministic: see `Bucket`.
        metadata: the plans of attention, if `step` is None.
        only_wanted: whether layers that write nothing compute only the tokens whose logits are wanted.
    """

    step: StepInput | None
    state: KVCache
    positions: Tensor
    bound: BoundNetwork
    deterministic: bool
    metadata: AttentionMetadata | None = None
    only_wanted: bool = False


def _begin_attention(model: DecoderParameters, it: PagedStep) -> Attend:
    metadata = it.metadata
    if metadata is None:
        assert it.step is not None
        planner = AttentionPlanner(it.bound.attentions, model.dtype_name, model.unmeasured_kernels)
        metadata = planner.plan_step(it.step, it.state)
    return PagedAttention(
        it.state,
        metadata,
        model.ropes,
        it.positions,
        rotation=it.bound.rotation,
        pdl=it.bound.pdl,
        batch_invariant=it.deterministic,
    )


def _begin_dense_attention(model: DecoderParameters, positions: Tensor, hidden: Tensor) -> Attend:
    ropes = [it.dense(positions, hidden.dtype) for it in model.ropes]
    sources = {it.kv_layer for it in model.network.attentions if it.kv_layer is not None}
    return DenseAttention(ropes, positions, sources)


class MixerSpec(NamedTuple):
    """The implementation of a kind of mixer.

    Attributes:
        bind: binds the mixer of a layer.
        begin: returns the context of a step over a state, once for all layers.
        begin_dense: the same for whole sequences without a state, [B, L, C] at positions [L]; differentiable.
        reads: the entry of its type in `READS`.
    """

    bind: Callable[[Any, Binder], BoundMixer]
    begin: Callable[[DecoderParameters, PagedStep], Any]
    begin_dense: Callable[[DecoderParameters, Tensor, Tensor], Any]
    reads: Mapping[str, Collection[Any] | None]


class MLPSpec(NamedTuple):
    """The implementation of a kind of MLP; attributes as of a `MixerSpec`."""

    bind: Callable[[Any, Binder], BoundMLP]
    reads: Mapping[str, Collection[Any] | None]


_FIELDS = (
    "window", "rotary", "qk_norm", "joint_qk_norm", "qk_norm_by_head", "softcap", "late_qk_norm", "query_scale", "bias",
    "output_bias", "value_norm", "tied_values", "kv_layer",
)  # fmt: skip
MIXERS: Final[dict[type, MixerSpec]] = {
    Attention: MixerSpec(
        BoundAttention.bind,
        _begin_attention,
        _begin_dense_attention,
        dict.fromkeys(_FIELDS, spec.ALL),
    )
}
MLPS: Final[dict[type, MLPSpec]] = {
    Dense: MLPSpec(
        BoundDense.bind, dict.fromkeys(("activation", "gated", "bias", "sparsity"), spec.ALL)
    )
}
READS: Final[spec.Reads] = {
    spec.Network: dict.fromkeys(
        (
            "embedding_factor", "positions", "logit_softcap", "tied", "head_bias", "per_layer",
            "streams",
        ),
        spec.ALL,
    ),
    spec.Positions: {"offset": spec.ALL},
    spec.Layer: dict.fromkeys(
        (
            "post_norms", "pre_norms", "parallel", "shared_norm", "per_layer", "scaled", "laurel",
            "altup",
        ),
        spec.ALL,
    ),
    spec.Norm: {"eps": spec.ALL, "kind": {"rms", "layer"}, "float32": spec.ALL, "bias": spec.ALL},
    spec.Rotary: spec.ALL,
    spec.QueryScale: spec.ALL,
    PerLayerTable: spec.ALL,
    PerLayerInput: spec.ALL,
    Laurel: spec.ALL,
    AltUp: spec.ALL,
    Streams: spec.ALL,
}  # fmt: skip
"""What the layer loop computes beside mixers and MLPs, whose fields their tables have."""


_OTHERS: Final[dict[str, Any]] = {
    "per_layer": BoundPerLayerInput, "laurel": BoundLaurel, "altup": BoundAltUp
}  # fmt: skip
"""What binds the other sublayers of a layer, by their fields."""


NO_DETERMINISTIC_STREAMS: Final = "no deterministic AltUp"
"""PyTorch's products of several streams have other bits beside other rows."""


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


def bind_network(model: DecoderParameters, purpose: Purpose) -> BoundNetwork:
    """Bind a model's parameters. In-place changes to them take effect; replacing them does not.

    Matrices of which a product has a copy are dropped, layer by layer, so that memory does not hold all of them twice.
    """
    network, arch, dtype = model.network, model.arch, model.dtype
    trainable = purpose is Purpose.TRAINING
    vectors = VectorProblem(model.dtype_name, trainable)
    rotation, _, refusals = select_vector(rope.REGISTRY, vectors, arch)
    if refusals and not (trainable or arch.is_cpu):
        reason = refusals[0].reasons[0]
        _logger.warning("PyTorch computes the layers, which is slower: %s", reason)
    head = LinearWeights(model.head, model.lm_head_bias)
    bound_head: Head = bind_projection(
        head, dtype, arch, purpose=purpose, in_place=model.head_format is not None
    )
    if bound_head.copies_weights:
        model.lm_head = None
    if model.communicator is not None:
        bound_head = GatheredHead(bound_head, network.vocab, model.communicator)
    if network.logit_softcap is not None:
        bound_head = SoftcappedHead(bound_head, network.logit_softcap)
    layers, kinds = [], {}
    for parameters in model.decoder_layers:
        layer, binder = parameters.spec, Binder(parameters, model, purpose)
        row = MIXERS[type(layer.mixer)]
        mixer = row.bind(layer.mixer, binder)
        kinds[type(mixer)] = row
        mlp = MLPS[type(layer.mlp)].bind(layer.mlp, binder)
        others = {
            name: kind.bind(getattr(layer, name), binder)
            for name, kind in _OTHERS.items()
            if getattr(layer, name) is not None
        }
        bound = BoundLayer(mixer, mlp, binder.bound, layer.parallel, scale=parameters.scale)
        layers.append(bound._replace(**others))
        for name, product in binder.bound.items():
            if product.copies_weights:
                parameters.drop_matrix(name)
    return BoundNetwork(
        layers=layers,
        kinds=kinds,
        attentions=attention_problems(network),
        norm=bind_norm(make_norm(model.norm, model.norm_bias, network.norm), vectors, arch),
        head=bound_head,
        rotation=rotation,
        pdl=rotation is rope.TRITON and may_depend(arch, model.device),
        table=None
        if network.per_layer is None
        else BoundTable.bind(network.per_layer, model, purpose),
        streams=None if network.streams is None else BoundStreams.bind(model),
    )


class Layers:
    """Computes with a model's layers; bound again for deterministic steps, when they first need it.

    Args:
        model: its parameters.
        purpose: what the results are for.
        run: computes all layers.
    """

    def __init__(
        self, model: DecoderParameters, purpose: Purpose, run: RunLayers = run_layers
    ) -> None:
        self._model, self._run = model, run
        self.bound = bind_network(model, purpose)
        self._deterministic: BoundNetwork | None = None
        self._adapted: dict[bool, BoundNetwork] = {}
        self._lora = StepLora()
        self._positions_reserved = False

    def reserve_positions(self, num_positions: int) -> None:
        """See `DecoderLM.reserve_positions`."""
        model = self._model
        for it in model.ropes:
            it.reserve(num_positions, model.dtype, model.device)
        self._positions_reserved = True

    def step(
        self, state: KVCache, step: StepInput, sampled: Tensor | None, out: StepOutput | None
    ) -> StepOutput:
        """Compute a step; see `DecoderLM.step`."""
        bucket, arrays, model = step.bucket, step.device, self._model
        has_adapters = ADAPTER in bucket.extra_columns
        only_wanted = bool(
            bucket.prompt_seqs
            and bucket.want is Want.TOKENS
            and not has_adapters
            and model.network.num_writing < len(model.network.layers)
        )
        bound = self.kernels(deterministic=bucket.deterministic, adapters=has_adapters)
        if has_adapters:
            self._lora.rows = lora_rows(step)
        hidden = self.hidden_states(
            PagedStep(
                step,
                state,
                arrays.positions,
                bound,
                bucket.deterministic,
                only_wanted=only_wanted,
            ),
            arrays.token_ids,
            sampled,
        )
        scores = None
        if bucket.want is Want.PROMPT_SCORES:
            scores = prompt_scores(step, hidden, bound.head)
        if not bucket.num_logits:
            return StepOutput(hidden.new_empty((0, model.network.vocab)), scores=scores)
        if not bucket.has_all_logits and not only_wanted:
            hidden = hidden[arrays.logits_rows]
        if out is None:
            return StepOutput(bound.head(hidden), scores=scores)
        assert out.tokens is not None
        assert out.logprobs is not None
        ids = bound.head.argmax(hidden, out.logits, out.tokens, out.logprobs)
        if sampled is not None:
            sampled.index_copy_(0, arrays.sampled_rows, ids)
        return out

    def hidden_states(
        self, it: PagedStep, input_ids: Tensor, sampled: Tensor | None = None
    ) -> Tensor:
        """Compute the hidden states after the last norm of packed tokens: [T, C], or [M, C] of `only_wanted`.

        Args:
            it: what the mixers read.
            input_ids: [T] int64; -1 - i refers to index i of `sampled`.
            sampled: [capacity] int64; None if there are no such ids.
        """
        model, bound = self._model, it.bound
        hidden = token_embeddings(model, input_ids, sampled)
        if not self._positions_reserved:
            capacity = min(model.max_context, it.state.num_blocks * it.state.block_size)
            for rotary in model.ropes:
                rotary.reserve(capacity, hidden.dtype, hidden.device)
        hidden = finish_embeddings(model.network, hidden, it.positions, model.embed_positions)
        contexts = {kind: row.begin(model, it) for kind, row in bound.kinds.items()}
        residual = bound.begin(contexts, input_ids, sampled, hidden)
        if not it.only_wanted:
            return bound.end(self._run(bound.layers, residual, contexts))
        assert it.step is not None
        first = model.network.num_writing
        residual = run_layers(bound.layers[:first], residual, contexts)
        if not it.step.bucket.num_logits:
            return hidden[:0]
        residual, contexts = self._wanted(it, it.step, residual, contexts)
        return bound.end(run_layers(bound.layers[first:], residual, contexts, first))

    def _wanted(
        self, it: PagedStep, step: StepInput, residual: Residual, contexts: Contexts
    ) -> tuple[Residual, Contexts]:
        """Return the residual stream and the contexts of the tokens whose logits are wanted."""
        arrays, planner = (
            step.device,
            AttentionPlanner(
                it.bound.attentions, self._model.dtype_name, self._model.unmeasured_kernels
            ),
        )
        rows = arrays.logits_rows
        metadata = planner.metadata(
            arrays.slot_mapping[rows],
            step.block_size,
            wanted_rows(step),
            None,
            it.state.kv_dtype,
            deterministic=it.deterministic,
        )
        wanted = it._replace(step=None, positions=it.positions[rows], metadata=metadata)
        narrowed: Contexts = {BoundAttention: _begin_attention(self._model, wanted)}
        if BoundPerLayerInput in contexts:
            narrowed[BoundPerLayerInput] = contexts[BoundPerLayerInput].index_select(1, rows)
        # Last, because launches that may start early read what those before this one have written.
        return Residual(settled(residual).index_select(-2, rows)), narrowed

    def paged(
        self, input_ids: Tensor, positions: Tensor, state: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Compute the hidden states of packed tokens, [T, C], whose attention the caller has planned.

        Args:
            input_ids: [T] int64.
            positions: [T] int64.
            state: written.
            metadata: from `AttentionPlanner.metadata`.
        """
        return self.hidden_states(
            PagedStep(None, state, positions, self.bound, deterministic=False, metadata=metadata),
            input_ids,
        )

    def dense(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the hidden states of whole sequences; see `DecoderLM.forward`."""
        model, bound = self._model, self.bound
        if isinstance(model.embed_tokens, Matrix):
            hidden = token_embeddings(model, input_ids.flatten()).view(*input_ids.shape, -1)
        else:  # differentiable
            hidden = functional.embedding(input_ids, model.embed_tokens)
        contexts = {
            kind: row.begin_dense(model, positions, hidden) for kind, row in bound.kinds.items()
        }
        hidden = finish_embeddings(model.network, hidden, positions, model.embed_positions)
        residual = bound.begin(contexts, input_ids, None, hidden)
        return bound.end(self._run(bound.layers, residual, contexts))

    def kernels(self, *, deterministic: bool, adapters: bool = False) -> BoundNetwork:
        """Return the bound parameters."""
        bound = self.bound
        if deterministic:
            if self._deterministic is None:
                purpose = Purpose.DETERMINISTIC_SERVING
                self._deterministic = bind_network(self._model, purpose)
            bound = self._deterministic
        if not adapters:
            return bound
        if deterministic not in self._adapted:
            slots = self._model.adapters
            assert slots is not None, "sequences with adapters have slots"
            pairs = zip(bound.layers, slots.layers, strict=True)
            layers = [layer.adapted(matrices, self._lora) for layer, matrices in pairs]
            self._adapted[deterministic] = bound._replace(layers=layers)
        return self._adapted[deterministic]

    @property
    def row_counts(self) -> tuple[int, ...]:
        """See `BoundNetwork.row_counts`; of deterministic steps once they are bound."""
        return (self._deterministic or self.bound).row_counts


def _unsupported(problem: ModelProblem, bucket: Bucket) -> tuple[str, ...]:
    network, others = problem.network, problem.network.other_mixers
    tables = {part: row.reads for table in (MIXERS, MLPS) for part, row in table.items()}
    on_cpu = bucket.deterministic and problem.arch.is_cpu
    return (
        *(("weights are in the layout of the C library",) if problem.is_in_library else ()),
        *(("no deterministic steps on a CPU",) if on_cpu else ()),
        *spec.unread(network, {**READS, **tables}),
        *_layer_norms(network),
        *_late_norms(problem),
        *_value_norms(network),
        *_sublayers(problem, bucket),
        *(f"no {name} of sequences" for name in bucket.extra_columns if name != ADAPTER),
        *(_no_adapters(problem) if ADAPTER in bucket.extra_columns else ()),
        *(f"no deterministic {name}" for name in others if bucket.deterministic),
        *(f"no {name} of drafts" for name in others if bucket.queries > 1),
    )


def _no_adapters(problem: ModelProblem) -> tuple[str, ...]:
    """List why the layers cannot have adapters."""
    return reasons(
        (problem.num_ranks > 1, "no adapters with tensor parallelism"),
        *((True, f"no adapters of {name}") for name in problem.network.other_mixers),
    )


def _layer_norms(network: spec.Network) -> tuple[str, ...]:
    """List where only RMS norms are computed and the network has layer norms."""
    per_head = (it.qk_norm for it in network.attentions if not it.qk_norm_by_head)
    after = (it.norm for it in network.layers if it.post_norms)
    return reasons(
        (any(it and it.kind == "layer" for it in per_head), "no layer norms of queries and keys"),
        (any(it.kind == "layer" for it in after), "no layer norms after attention and MLP"),
    )


def _late_norms(problem: ModelProblem) -> tuple[str, ...]:
    """List why the norms after the rotation cannot be computed: their weights are applied to rotated queries alone."""
    late = [it for it in problem.network.attentions if it.qk_norm is not None and it.late_qk_norm]
    scaled = any(it.rotary is not None and it.rotary.attention_factor != 1 for it in late)
    return reasons(
        (
            bool(late) and problem.kv_dtype is not None,
            "no norms of queries and keys after the rotation over a KV cache in FP8: set --kv-cache-dtype auto",
        ),
        (scaled, "no norms of queries and keys after a rotation that scales them"),
        (
            any(it.joint_qk_norm for it in late),
            "no norms of all queries and of all keys after the rotation",
        ),
    )


def _value_norms(network: spec.Network) -> tuple[str, ...]:
    """List where norms of values cannot be computed, because the rotation includes no norms of queries and keys."""
    others = (
        it.qk_norm is None or it.joint_qk_norm or it.qk_norm_by_head or it.late_qk_norm
        for it in network.attentions
        if it.value_norm
    )
    return reasons((any(others), "no norms of values without norms of queries and keys per head"))


def _sublayers(problem: ModelProblem, bucket: Bucket) -> tuple[str, ...]:
    """List why steps of a network with several streams cannot be computed."""
    has_streams = problem.network.streams is not None
    return reasons((has_streams and bucket.deterministic, NO_DETERMINISTIC_STREAMS))


def _bind(bindings: Bindings, state: KVCache, _bucket: Bucket) -> ExecutorOfState:
    return ExecutorOfState(bindings.layers, state)


LAYERS: Final = ExecutorSpec("layers", _unsupported, _bind)
"""Computes every part that the tables above have, on every processor."""
