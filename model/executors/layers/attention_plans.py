"""The attention problems of a model's layers, and the attention plans of a step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from kernels import AttentionPlan, AttentionProblem, PagedBatch, Phase, plan_attention
from model.network.attention_problems import attention_problem, attention_problems

if TYPE_CHECKING:
    from torch import Tensor

    from model.device.kv_cache import KVCache
    from model.executors.step import StepInput
    from model.network.parameters import DecoderParameters
    from model.network.spec import Attention


class PhasePlans(NamedTuple):
    """The attention plans of a step's decode rows and of its prefill rows; None if there are none."""

    decode: AttentionPlan | None
    prefill: AttentionPlan | None


@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Metadata for the attention of one step, whose tokens are packed as [decode rows | prefill rows].

    `AttentionPlanner.metadata` builds it; all layers use the same object.

    Attributes:
        slot_mapping: [T] int32, block_id * block_size + offset of each token; -1 writes nothing.
        num_decode_tokens: number of leading rows that the plans of decode rows cover.
        plans: of each attention problem of the layers, in the order of `AttentionPlanner.mixers`.
        most_keys: upper bound of the keys that a layer reads, summed over all sequences.
    """

    slot_mapping: Tensor
    num_decode_tokens: int
    plans: tuple[PhasePlans, ...]
    most_keys: int = 0


def attention_planner(model: DecoderParameters) -> AttentionPlanner:
    """Return the planner of a model's attention."""
    return AttentionPlanner(
        attention_problems(model.network), model.dtype_name, model.unmeasured_kernels
    )


@dataclasses.dataclass(frozen=True)
class AttentionPlanner:
    """Describes the attention of a model and plans it, once a step for all layers with the same problem.

    Attributes:
        mixers: from `attention_problems`.
        dtype: name of the dtype of its activations.
        unmeasured: whether kernels may be chosen that were never measured on a GPU.
    """

    mixers: tuple[Attention, ...]
    dtype: str
    unmeasured: bool = False

    def problem(
        self,
        mixer: Attention,
        phase: Phase,
        block_size: int,
        kv_dtype: str | None = None,
        *,
        deterministic: bool = False,
        queries: int = 1,
    ) -> AttentionProblem:
        """Return the attention problem of a mixer, for kernel selection.

        Args:
            mixer: one of `mixers`.
            phase: prefill or decode.
            block_size: tokens per cache block.
            kv_dtype: dtype of a quantized cache, as `KVCache.kv_dtype`.
            deterministic: whether the problem is that of a deterministic step.
            queries: most tokens of a decode row.
        """
        return dataclasses.replace(
            attention_problem(mixer, phase, self.dtype, block_size, kv_dtype),
            max_query_tokens=queries,
            batch_invariant=deterministic,
            unmeasured=self.unmeasured,
        )

    def problems(
        self,
        block_size: int,
        kv_dtype: str | None = None,
        *,
        deterministic: bool = False,
        queries: int = 1,
    ) -> list[AttentionProblem]:
        """Return the attention problem of each mixer and phase; arguments as for `problem`."""
        return [
            self.problem(
                mixer,
                phase,
                block_size,
                kv_dtype,
                deterministic=deterministic,
                queries=queries if phase is Phase.DECODE else 1,
            )
            for mixer in self.mixers
            for phase in Phase
        ]

    def plan_step(self, step: StepInput, kv_cache: KVCache) -> AttentionMetadata:
        """Plan the attention of a step over a cache, for all layers."""
        return self.metadata(
            step.device.slot_mapping,
            step.block_size,
            step.decode,
            step.prefill,
            kv_cache.kv_dtype,
            deterministic=step.bucket.deterministic,
        )

    def metadata(
        self,
        slot_mapping: Tensor,
        block_size: int,
        decode: PagedBatch | None,
        prefill: PagedBatch | None,
        kv_dtype: str | None = None,
        *,
        deterministic: bool = False,
    ) -> AttentionMetadata:
        """Plan one step's attention for each problem of the layers.

        Args:
            slot_mapping: [T] int32 for the step's tokens, [decode rows | prefill rows].
            block_size: tokens per cache block.
            decode: the decode rows; None if there are none.
            prefill: the other sequences; None if there are none.
            kv_dtype: dtype of a quantized cache, as `KVCache.kv_dtype`.
            deterministic: see `Bucket`.
        """

        def plan(mixer: Attention, phase: Phase, batch: PagedBatch | None) -> AttentionPlan | None:
            if batch is None:
                return None
            problem = self.problem(
                mixer,
                phase,
                block_size,
                kv_dtype,
                deterministic=deterministic,
                queries=batch.max_seqlen_q if phase is Phase.DECODE else 1,
            )
            return plan_attention(problem, batch)

        num_decode_tokens = 0 if decode is None else decode.num_tokens
        most_keys = sum(
            batch.num_seqs * batch.max_seqlen_k for batch in (decode, prefill) if batch is not None
        )
        plans = tuple(
            PhasePlans(plan(mixer, Phase.DECODE, decode), plan(mixer, Phase.PREFILL, prefill))
            for mixer in self.mixers
        )
        return AttentionMetadata(slot_mapping, num_decode_tokens, plans, most_keys)
