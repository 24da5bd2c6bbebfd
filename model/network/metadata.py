"""What the attention of one step needs beside the tokens: where to write and what to attend."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kernels import AttentionPlan


@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """One step's attention; its tokens lie packed as [decode rows | prefill rows].

    Built by `DecoderLM.attention_metadata`, reused by all layers.

    Attributes:
        slot_mapping: [T] int32, block_id * block_size + offset of every token; -1 writes nothing.
        num_decode_tokens: tokens; the leading rows, one per sequence, that `decode` covers.
        decode: plan of the decode rows; None where there are none.
        prefill: plan of the prefill rows; None where there are none.
        sliding_decode: plan of the decode rows for sliding layers, in models that mix both kinds
            of layer; elsewhere None, and `decode` fits every layer.
        sliding_prefill: the same for the prefill rows.
        most_keys: that a layer attends to at most, of all sequences.
    """

    slot_mapping: Tensor
    num_decode_tokens: int
    decode: AttentionPlan | None
    prefill: AttentionPlan | None
    sliding_decode: AttentionPlan | None = None
    sliding_prefill: AttentionPlan | None = None
    most_keys: int = 0
