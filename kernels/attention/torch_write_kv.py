"""Scatter of a step's keys and values into the paged cache, in PyTorch.

Knows slots, not blocks or sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot; shapes as in the door's `write_kv`."""
    if slot_mapping.is_cuda:
        _write_without_sync(k, v, kv, slot_mapping)
        return
    if slot_mapping.numel() == 0:
        return
    # 1.2 us for a decode step; a caller's promise would save no more than that.
    if int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    slots = slot_mapping.long()
    keys, values = kv.flatten(1, 2).unbind(0)
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)


def _write_without_sync(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Skip -1 slots without a host round trip: they repeat the first valid token's write."""
    slots = slot_mapping.long()
    if slots.numel() == 0:
        return
    valid = slots >= 0
    first = valid.to(torch.int8).argmax()
    rows = torch.where(valid, torch.arange(slots.numel(), device=slots.device), first)
    # With no valid token at all, slot 0 is rewritten with what it holds.
    targets = slots[rows].clamp_min(0)
    some = valid[first]
    for new, cache in zip((k, v), kv.flatten(1, 2).unbind(0), strict=True):
        cache.index_copy_(0, targets, torch.where(some, new[rows], cache[targets]))
