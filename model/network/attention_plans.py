"""The attention problems of a model's layers, and the attention plans of a step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kernels import AttentionPlan, AttentionProblem, PagedBatch, Phase, plan_attention
from model.network.metadata import AttentionMetadata

if TYPE_CHECKING:
    from torch import Tensor

    from model.checkpoint.config import ModelConfig
    from model.device.kv_cache import KVCache
    from model.network.step import StepInput


@dataclasses.dataclass(frozen=True)
class AttentionPlanner:
    """Describes the attention of a model and plans it, once a step for all layers of a kind.

    Attributes:
        config: the model's configuration.
        dtype: name of the dtype of its activations.
        unmeasured: whether kernels may be chosen that were never measured on a GPU.
    """

    config: ModelConfig
    dtype: str
    unmeasured: bool = False

    def problem(
        self,
        phase: Phase,
        block_size: int,
        *,
        sliding: bool = False,
        kv_dtype: str | None = None,
        deterministic: bool = False,
        queries: int = 1,
    ) -> AttentionProblem:
        """Return the attention problem of the layers, for kernel selection.

        Args:
            phase: prefill or decode.
            block_size: tokens per cache block.
            sliding: whether to describe the sliding-window layers; only for a model that mixes both kinds.
            kv_dtype: dtype of a quantized cache, as `KVCache.kv_dtype`.
            deterministic: whether the problem is that of a deterministic step.
            queries: most tokens of a decode row.
        """
        config = self.config
        window = None if config.mixes_attention and not sliding else config.sliding_window
        return AttentionProblem(
            phase=phase,
            dtype=self.dtype,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            softmax_scale=config.softmax_scale,
            sliding_window=window,
            softcap=config.attention_softcap,
            max_query_tokens=queries,
            batch_invariant=deterministic,
            kv_dtype=kv_dtype,
            unmeasured=self.unmeasured,
        )

    def problems(
        self, block_size: int, kv_dtype: str | None = None, *, deterministic: bool = False
    ) -> list[AttentionProblem]:
        """Return the attention problem of each kind of layer and phase; a step may need a kernel for each."""
        kinds = (False, True) if self.config.mixes_attention else (False,)
        return [
            self.problem(
                phase, block_size, sliding=sliding, kv_dtype=kv_dtype, deterministic=deterministic
            )
            for sliding in kinds
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
        """Plan one step's attention for each kind of layer in the model.

        Args:
            slot_mapping: [T] int32 for the step's tokens, [decode rows | prefill rows].
            block_size: tokens per cache block.
            decode: the decode rows; None if there are none.
            prefill: the other sequences; None if there are none.
            kv_dtype: dtype of a quantized cache, as `KVCache.kv_dtype`.
            deterministic: see `Bucket`.
        """

        def plans(*, sliding: bool) -> list[AttentionPlan | None]:
            return [
                None
                if batch is None
                else plan_attention(
                    self.problem(
                        phase,
                        block_size,
                        sliding=sliding,
                        kv_dtype=kv_dtype,
                        deterministic=deterministic,
                        queries=batch.max_seqlen_q if phase is Phase.DECODE else 1,
                    ),
                    batch,
                )
                for phase, batch in ((Phase.DECODE, decode), (Phase.PREFILL, prefill))
            ]

        sliding = plans(sliding=True) if self.config.mixes_attention else [None, None]
        num_decode_tokens = 0 if decode is None else decode.num_tokens
        most_keys = sum(
            batch.num_seqs * batch.max_seqlen_k for batch in (decode, prefill) if batch is not None
        )
        full = plans(sliding=False)
        return AttentionMetadata(
            slot_mapping, num_decode_tokens, full[0], full[1], sliding[0], sliding[1], most_keys
        )
