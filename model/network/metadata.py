"""Attention metadata of one step: where to write keys and values, and the plans of its decode and prefill rows."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

from kernels import AttentionPlan


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
