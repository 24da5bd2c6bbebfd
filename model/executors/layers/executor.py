"""Computes the steps of a model layer by layer; what a layer computes follows from its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch.nn import functional

from kernels.linear.lora import StepLora
from kernels.linear.projection import Purpose, Residual, settled
from model.executors.columns import ADAPTER, Want
from model.executors.embedding import finish_embeddings, token_embeddings
from model.executors.executor import ExecutorOfState, ExecutorSpec
from model.executors.layers.attention import BoundAttention
from model.executors.layers.attention_plans import AttentionPlanner
from model.executors.layers.bind import bind_network
from model.executors.layers.contexts import begin_attention
from model.executors.layers.forward import run_layers
from model.executors.layers.limits import unsupported
from model.executors.layers.network import PagedStep
from model.executors.layers.per_layer import BoundPerLayerInput
from model.executors.scores import prompt_scores
from model.executors.step import StepOutput, lora_rows, wanted_rows
from model.network.matrix import Matrix

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.segments import Segments
    from model.device.kv_cache import KVCache
    from model.executors.columns import Bucket
    from model.executors.executor import Bindings
    from model.executors.layers.attention_plans import AttentionMetadata
    from model.executors.layers.forward import Contexts, RunLayers
    from model.executors.layers.network import BoundNetwork
    from model.executors.step import StepInput
    from model.network.parameters import DecoderParameters


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
        narrowed: Contexts = {BoundAttention: begin_attention(self._model, wanted)}
        if BoundPerLayerInput in contexts:
            narrowed[BoundPerLayerInput] = contexts[BoundPerLayerInput].index_select(1, rows)
        # Last, because launches that may start early read what those before this one have written.
        return Residual(settled(residual).index_select(-2, rows)), narrowed

    def paged(
        self,
        input_ids: Tensor,
        positions: Tensor,
        state: KVCache,
        metadata: AttentionMetadata,
        segments: Segments | None = None,
    ) -> Tensor:
        """Compute the hidden states of packed tokens, [T, C], whose attention the caller has planned.

        Args:
            input_ids: [T] int64.
            positions: [T] int64.
            state: written.
            metadata: from `AttentionPlanner.metadata`.
            segments: of a network with recurrent mixers.
        """
        it = PagedStep(
            None,
            state,
            positions,
            self.bound,
            deterministic=False,
            metadata=metadata,
            segments=segments,
        )
        return self.hidden_states(it, input_ids)

    def dense(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the hidden states of whole sequences; see `DecoderLM.forward`."""
        model, bound = self._model, self.bound
        if isinstance(model.embed_tokens, Matrix) or model.embedding_rows is not None:
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
        """Return the bound parameters; on a CPU the same ones for deterministic steps."""
        bound = self.bound
        deterministic = deterministic and not self._model.arch.is_cpu
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


def _bind(bindings: Bindings, state: KVCache, _bucket: Bucket) -> ExecutorOfState:
    return ExecutorOfState(bindings.layers, state)


LAYERS: Final = ExecutorSpec("layers", unsupported, _bind)
"""Computes every part that the tables of `model.executors.layers.tables` have, on every processor."""
