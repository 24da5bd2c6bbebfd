"""Writes a step's keys and values to the paged cache, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.fp8 import quantize_kv_rows


def write_kv(
    k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    """Write each token's key and value to its slot; shapes as in `kernels.write_kv`."""
    if slot_mapping.shape[0] == 0:
        return
    # This check takes a microsecond per layer.
    if _smallest(slot_mapping) < 0:
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    slots = slot_mapping.long()
    if kv_scale is not None:
        _write_fp8(k, v, kv, slots, kv_scale)
        return
    keys, values = kv.view(2, -1, *kv.shape[3:]).unbind(0)
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)


def _write_fp8(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor, kv_scale: Tensor) -> None:
    # As bytes, because PyTorch cannot copy float8 by index.
    cache = kv.view(torch.uint8).view(2, -1, *kv.shape[3:])
    block, offset = slots // kv.shape[2], slots % kv.shape[2]
    for side, rows in enumerate((k, v)):
        numbers, scale = quantize_kv_rows(rows)
        cache[side].index_copy_(0, slots, numbers.view(torch.uint8))
        kv_scale[side][block, :, offset] = scale


def _smallest(slot_mapping: Tensor) -> int:
    if slot_mapping.shape[0] <= 32:
        return int(min(slot_mapping.tolist()))
    return int(slot_mapping.min())
