"""Scatter of a step's keys and values into the paged cache, in Triton.

Knows slots, not blocks or sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def scatter(
    k,
    v,
    keys,
    values,
    slot_mapping,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one token's key and value, [HEADS, D] each, to its slot; program per token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    element = tl.arange(0, BLOCK)
    exists = element < HEADS * D
    head, column = (element // D).to(tl.int64), element % D
    key = tl.load(k + token * k_stride + head * k_head_stride + column, mask=exists)
    value = tl.load(v + token * v_stride + head * v_head_stride + column, mask=exists)
    target = slot * (HEADS * D) + element
    tl.store(keys + target, key, mask=exists)
    tl.store(values + target, value, mask=exists)


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot; shapes as in the door's `write_kv`."""
    num_tokens, heads, head_dim = k.shape
    if num_tokens == 0:
        return
    keys, values = kv.unbind(0)
    block = triton.next_power_of_2(heads * head_dim)
    scatter[(num_tokens,)](
        k,
        v,
        keys,
        values,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEADS=heads,
        D=head_dim,
        BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
    )
