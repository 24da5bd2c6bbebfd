"""The operations between a QKV projection and attention: norm per head, rotary embedding and cache write.

One launch processes all tokens of a step, of decodes and prefills. It can also prefetch weights that are read after a
short attention to the second-level cache, since attention leaves memory bandwidth unused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch
from kernels.gpu.fp8 import powers_of_two, scale_bits, to_e4m3
from kernels.gpu.functions import (
    LINE_BYTES,
    fetch_lines,
    load_halves,
    normalize_halves,
    rotate_halves,
)
from kernels.gpu.hadamard import hadamard_transform

_FEW_HEADS = 1024
"""Up to this number of heads, of all tokens together, each head has a program, since all of them run at once."""
_SOME_HEADS = 16384
"""Up to this number a program has one head of several tokens. A step of 64 sequences of Qwen3-0.6B, 2048 heads, takes
1560 us on an H100 with a program for each head and 1534 with four tokens a program; one of 256, 8192 heads, 3891 us
with four heads of four tokens and 3882 with one."""
_FEW_FP8_HEADS = 512
"""As `_FEW_HEADS`, if they are mixed and rounded to FP8. On an H100, 64 tokens of 32 heads take 2.7 us in programs of
four tokens and 3.6 in programs of one."""
_MANY_TOKENS = 1024
_NARROW_HALF = 8
"""Up to this HALF a program has one head: Triton 3.6 fails to compile several heads whose half is 2, 4 or 8 columns.
Its removal of layout conversions (`TritonGPURemoveLayoutConversions`) puts a stored value where it does not dominate
its use. Halves of 16 columns or more compile, from sm_80 to sm_120, in all three dtypes."""
_FETCH_LINES = 512
"""Cache lines that a prefetching program fetches."""
_FETCH_BYTES = 24 << 20
"""Half of Hopper's second-level cache of 50 MB."""


class RotationLaunch(NamedTuple):
    """The tile sizes of a launch.

    Attributes:
        tokens: per program, a power of two.
        heads: per program, one after the other; the program loads what depends on the token alone only once.
        num_warps: per program.
    """

    tokens: int
    heads: int
    num_warps: int


@triton.jit(do_not_specialize=["num_tokens", "lines_1", "lines_2"])
def rotate_and_write(
    qkv, q_out, keys, values, key_scales, value_scales, q_weight, k_weight, cos, sin, positions, slot_mapping,
    ahead_1, ahead_2, lines_1, lines_2, num_tokens, qkv_stride, q_stride, eps, value_eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, VALUE_NORM: tl.constexpr,
    FP8: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process BLOCK_H heads of BLOCK_T tokens; program (tokens, heads), over the heads of q, k and v.

    HALF is D / 2 rounded up to a power of two. `keys` and `values` are bytes if FP8; BLOCK_SIZE is S. If FETCH is
    not 0, the programs after those of the heads prefetch FETCH lines each. Offsets within a program have 32 bits.
    """
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    if FETCH > 0:
        HEAD_PROGRAMS: tl.constexpr = (ALL + BLOCK_H - 1) // BLOCK_H
        if tl.program_id(1) >= HEAD_PROGRAMS:
            number = (tl.program_id(1) - HEAD_PROGRAMS) * tl.num_programs(0) + tl.program_id(0)
            if PDL:
                gdc_launch_dependents()
            fetch_lines(ahead_1, ahead_2, lines_1, lines_2, number * FETCH, FETCH)
            return
    first_token = tl.program_id(0) * BLOCK_T
    row = tl.arange(0, BLOCK_T)[:, None]
    column = tl.arange(0, HALF)[None, :]
    is_token = first_token + row < num_tokens
    exists = is_token & (column < D // 2)
    if PDL:
        gdc_launch_dependents()
    # These may be read before the wait: they were written before the last launch without `pdl`.
    place = first_token + row
    position = tl.load(positions + place, mask=is_token, other=0, cache_modifier=".cg").to(tl.int32)
    slot = tl.load(slot_mapping + place, mask=is_token, other=-1, cache_modifier=".cg").to(tl.int64)
    # The halves of cos are the same, those of sin up to their sign.
    angle = position * D + column
    cosine = tl.load(cos + angle, mask=exists, other=0.0).to(tl.float32)
    sine = tl.load(sin + D // 2 + angle, mask=exists, other=0.0).to(tl.float32)
    q_gains = (cosine, cosine)
    k_gains = (cosine, cosine)
    if NORM:
        wide = row * 0 + column
        q_gains = load_halves(q_weight + wide, exists, D)
        k_gains = load_halves(k_weight + wide, exists, D)
    if PDL:
        gdc_wait()

    first_head = tl.program_id(1) * BLOCK_H
    source = qkv + first_token.to(tl.int64) * qkv_stride + first_head * D
    source += row * qkv_stride + column
    firsts = load_heads(source, exists, ALL - first_head, D, BLOCK_H)
    seconds = load_heads(source + D // 2, exists, ALL - first_head, D, BLOCK_H)
    target = q_out + first_token.to(tl.int64) * q_stride + row * q_stride + column
    line = slot * (KV_HEADS * D) + column
    # Of the first head; BLOCK_SIZE elements from head to head.
    scale_line = slot // BLOCK_SIZE * (KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
    is_slot = exists & (slot >= 0)
    for i in tl.static_range(BLOCK_H):
        head = first_head + i
        is_query = head < HEADS
        first = firsts[i].to(tl.float32)
        second = seconds[i].to(tl.float32)
        if NORM:
            gain_1 = tl.where(is_query, q_gains[0], k_gains[0]).to(tl.float32)
            gain_2 = tl.where(is_query, q_gains[1], k_gains[1]).to(tl.float32)
            first, second = normalize_halves(
                first, second, gain_1, gain_2, eps, D, qkv.dtype.element_ty
            )
        first, second = rotate_halves(first, second, cosine, sine)
        first = first.to(qkv.dtype.element_ty)
        second = second.to(qkv.dtype.element_ty)
        if FP8:
            first, second = hadamard_transform(first, second, D, qkv.dtype.element_ty)
            first = first.to(qkv.dtype.element_ty)
            second = second.to(qkv.dtype.element_ty)
        if is_query:
            tl.store(target + head * D, first, mask=exists)
            tl.store(target + head * D + D // 2, second, mask=exists)
        elif head < HEADS + KV_HEADS:
            at = keys + (head - HEADS) * D + line
            scales = key_scales + (head - HEADS) * BLOCK_SIZE + scale_line
            write_head(at, scales, first, second, is_slot, D, FP8)
        elif head < ALL:
            at = values + (head - HEADS - KV_HEADS) * D + line
            scales = value_scales + (head - HEADS - KV_HEADS) * BLOCK_SIZE + scale_line
            value_1 = firsts[i]
            value_2 = seconds[i]
            if VALUE_NORM:
                value_1, value_2 = normalize_halves(
                    value_1.to(tl.float32), value_2.to(tl.float32), 1.0, 1.0, value_eps, D,
                    qkv.dtype.element_ty,
                )  # fmt: skip
            write_head(at, scales, value_1, value_2, is_slot, D, FP8)


@triton.jit
def write_head(target, scales, first, second, is_slot, D: tl.constexpr, FP8: tl.constexpr):
    """Write keys or values of a head, in halves, to their slots; in FP8 with their scales, [rows, 1] addresses."""
    if FP8:
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)[:, None]
        scale, inverse = powers_of_two(scale_bits(largest))
        tl.store(target, to_e4m3(first * inverse), mask=is_slot)
        tl.store(target + D // 2, to_e4m3(second * inverse), mask=is_slot)
        tl.store(scales, scale, mask=tl.max(is_slot.to(tl.int32), 1)[:, None] > 0)
    else:
        tl.store(target, first, mask=is_slot)
        tl.store(target + D // 2, second, mask=is_slot)


@triton.jit
def load_heads(address, exists, num_heads, D: tl.constexpr, COUNT: tl.constexpr):
    """Load one half of each of COUNT heads that lie D elements apart; `num_heads` of them exist."""
    halves = ()
    for i in tl.static_range(COUNT):
        half = tl.load(address + i * D, mask=exists & (i < num_heads), other=0.0)
        halves = halves + (half,)  # type: ignore[assignment]
    return halves


def rotation_launch(
    num_tokens: int, num_heads: int, half: int, *, fp8: bool = False, batch_invariant: bool = False
) -> RotationLaunch:
    """Choose the tile sizes: small ones for few heads, so that no program takes long.

    There are only four launches, since each is a kernel to compile. A thread of the larger ones loads 16 bytes at once.
    Programs of narrow heads have one head (`_NARROW_HALF`).

    Args:
        num_tokens: T.
        num_heads: of queries, keys and values together.
        half: HALF.
        fp8: whether heads are mixed and rounded to FP8, which takes registers and time: a program has fewer of them.
        batch_invariant: whether the launch may not depend on the number of tokens, since it decides about the order in
            which a norm adds its squares.
    """
    several = 1 if half <= _NARROW_HALF else 4
    if batch_invariant:
        return RotationLaunch(max(1, 256 // half), several, 1)
    if num_tokens * num_heads <= (_FEW_FP8_HEADS if fp8 else _FEW_HEADS):
        return RotationLaunch(1, 1, 1)
    warps = 1 if num_tokens < _MANY_TOKENS else 4
    heads = 1 if warps == 1 and (fp8 or num_tokens * num_heads <= _SOME_HEADS) else several
    return RotationLaunch(max(1, warps * 256 // half), heads, warps)


def lines_ahead(tensors: tuple[Tensor, Tensor] | None) -> tuple[int, int]:
    """Return how many lines of each of two tensors are prefetched, up to `_FETCH_BYTES`, those of the first first."""
    if tensors is None:
        return 0, 0
    size = LINE_BYTES.value
    first, second = (tensor.nbytes // size for tensor in tensors)
    first = min(first, _FETCH_BYTES // size)
    return first, min(second, _FETCH_BYTES // size - first)


def rope_and_write_kv(
    qkv: Tensor,
    kv: Tensor,
    rope: tuple[Tensor, Tensor],
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    value_eps: float | None = None,
    q_out: Tensor | None = None,
    kv_scale: Tensor | None = None,
    ahead: tuple[Tensor, Tensor] | None = None,
    batch_invariant: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Normalize queries and keys per head, apply rotary embeddings, and write keys and values to their slots.

    Over an FP8 cache, queries and keys are then also multiplied by `kernels.hadamard.hadamard_matrix`.

    Args:
        qkv: [T, (H + 2 * K) * D], contiguous in its rows.
        kv: [2, N, S, K, D] contiguous, in qkv's dtype or float8_e4m3fn; index 0 keys, 1 values. K may be 0.
        rope: cos and sin, [positions, 1, D] contiguous each, as `rope_tables` returns them, in qkv's dtype.
        positions: [T] int64, rows of `rope`.
        slot_mapping: [T] int32 or int64; -1 skips a token's key and value.
        norms: weights of the queries' and the keys' norm, [D] each; None where the family has none.
        eps: of the norms.
        value_eps: eps of a norm of values without a weight; None if they have none.
        q_out: [T, H, D], contiguous in a token; None writes the queries over those in `qkv`.
        kv_scale: of a float8_e4m3fn cache, [2, N, K, S] float32 contiguous; written.
        ahead: two tensors that later kernels read; their first 24 MiB are prefetched to the second-level cache.
        batch_invariant: whether a token's results must have the same bits among any others.
        pdl: use programmatic dependent launch. `positions` and `slot_mapping` are then read before the wait:
            the kernels that write them must be followed by a launch without `pdl` before this one.

    Returns:
        The queries [T, H, D]: `q_out`, or a view of `qkv`.
    """
    tokens, size = qkv.shape
    kv_heads, head_dim = kv.shape[3:]
    heads = size // head_dim - 2 * kv_heads
    if q_out is None:
        q_out = qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    if tokens == 0:
        return q_out
    keys, values = (kv if kv_scale is None else kv.view(torch.uint8)).unbind(0)
    scales = (kv if kv_scale is None else kv_scale).unbind(0)
    half = triton.next_power_of_2(head_dim // 2)
    launch = rotation_launch(
        tokens,
        heads + 2 * kv_heads,
        half,
        fp8=kv_scale is not None,
        batch_invariant=batch_invariant,
    )
    blocks = triton.cdiv(tokens, launch.tokens)
    q_weight, k_weight = (qkv, qkv) if norms is None else norms
    lines = lines_ahead(ahead)
    programs = triton.cdiv(heads + 2 * kv_heads, launch.heads)
    programs += triton.cdiv(sum(lines), _FETCH_LINES * blocks)
    rotate_and_write[(blocks, programs)](
        qkv, q_out, keys, values, *scales, q_weight, k_weight, *rope, positions, slot_mapping,
        *((qkv, qkv) if ahead is None else ahead), *lines, tokens, qkv.stride(0), q_out.stride(0), eps,
        value_eps or 0.0,
        HEADS=heads, KV_HEADS=kv_heads, D=head_dim, HALF=half, BLOCK_T=launch.tokens, BLOCK_H=launch.heads,
        BLOCK_SIZE=kv.shape[2], NORM=norms is not None, VALUE_NORM=value_eps is not None, FP8=kv_scale is not None,
        FETCH=0 if ahead is None else _FETCH_LINES, num_warps=launch.num_warps, **dependent_launch(pdl),
    )  # fmt: skip
    return q_out
