"""Writes a step's keys and values to the paged cache, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.fp8 import quantize


@triton.jit
def scatter(
    k, v, keys, values, slot_mapping, k_stride, k_head_stride, v_stride, v_head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one token's key and value, [HEADS, D] each, to its slot; program (token)."""
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


@triton.jit
def scatter_fp8(
    k, v, keys, values, key_scales, value_scales, slot_mapping, k_stride, k_head_stride, v_stride,
    v_head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Quantize one token's key and value, [HEADS, D] each, and write them to its slot; program (token)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)[None, :]
    is_head = head < HEADS
    exists = is_head[:, None] & (column < D)
    wide_head = head.to(tl.int64)[:, None]
    key = tl.load(k + token * k_stride + wide_head * k_head_stride + column, mask=exists, other=0.0)
    value = tl.load(
        v + token * v_stride + wide_head * v_head_stride + column, mask=exists, other=0.0
    )
    key, key_scale = quantize(key)
    value, value_scale = quantize(value)
    target = slot * (HEADS * D) + head[:, None] * D + column
    tl.store(keys + target, key, mask=exists)
    tl.store(values + target, value, mask=exists)
    place = (slot // BLOCK_SIZE * HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    tl.store(key_scales + place, key_scale, mask=is_head)
    tl.store(value_scales + place, value_scale, mask=is_head)


def write_kv(
    k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    """Write each token's key and value to its slot; shapes as in `kernels.write_kv`."""
    num_tokens, heads, head_dim = k.shape
    if num_tokens == 0:
        return
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    if kv_scale is not None:
        block_h, block_d = triton.next_power_of_2(heads), triton.next_power_of_2(head_dim)
        scatter_fp8[(num_tokens,)](
            k, v, *kv.view(torch.uint8).unbind(0), *kv_scale.unbind(0), slot_mapping, *strides,
            HEADS=heads, D=head_dim, BLOCK_SIZE=kv.shape[2], BLOCK_H=block_h, BLOCK_D=block_d,
            num_warps=_warps(block_h * block_d),
        )  # fmt: skip
        return
    block = triton.next_power_of_2(heads * head_dim)
    scatter[(num_tokens,)](
        k, v, *kv.unbind(0), slot_mapping, *strides,
        HEADS=heads, D=head_dim, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def _warps(elements: int) -> int:
    """Return the number of warps for eight elements per thread, a 16-byte load in half precision."""
    return min(8, max(1, elements // 256))
