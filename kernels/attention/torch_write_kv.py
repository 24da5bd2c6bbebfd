"""Scatter of a step's keys and values into the paged cache, in PyTorch.

Knows slots, not blocks or sequences.
"""

from __future__ import annotations

from torch import Tensor


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot; shapes as in the door's `write_kv`."""
    if slot_mapping.shape[0] == 0:
        return
    # A microsecond per layer: a caller's promise that no token is skipped would save no more.
    if _smallest(slot_mapping) < 0:
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    slots = slot_mapping.long()
    keys, values = kv.view(2, -1, *kv.shape[3:]).unbind(0)
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)


def _smallest(slot_mapping: Tensor) -> int:
    if slot_mapping.shape[0] <= 32:
        return int(min(slot_mapping.tolist()))
    return int(slot_mapping.min())
