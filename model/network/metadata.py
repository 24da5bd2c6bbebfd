"""Attention metadata of one step: where to write keys and values, and the plans of its decode and prefill rows."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kernels import AttentionPlan


@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Metadata for the attention of one step, whose tokens are packed as [decode rows | prefill rows].

    `AttentionPlanner.metadata` builds it; all layers use the same object.

    Attributes:
        slot_mapping: [T] int32, block_id * block_size + offset of each token; -1 writes nothing.
        num_decode_tokens: number of leading rows that `decode` covers.
        decode: plan of the decode rows; None if there are none.
        prefill: plan of the prefill rows; None if there are none.
        sliding_decode: plan of the decode rows for sliding-window layers, in models that mix both kinds of layer;
            None in other models, where `decode` is for every layer.
        sliding_prefill: the same for the prefill rows.
        most_keys: upper bound of the keys that a layer reads, summed over all sequences.
    """

    slot_mapping: Tensor
    num_decode_tokens: int
    decode: AttentionPlan | None
    prefill: AttentionPlan | None
    sliding_decode: AttentionPlan | None = None
    sliding_prefill: AttentionPlan | None = None
    most_keys: int = 0
