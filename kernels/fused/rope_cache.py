"""From the output of a QKV projection to what attention reads: norm per head, rotation, cache write.

One launch for the tokens of a step, decoded or prefilled. Beside it the second-level cache can fetch what is read
after a short attention, during which memory has little to do. Knows slots and positions, not sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.fused.dependent import dependent_launch
from kernels.fused.device import LINE_BYTES, prefetch

if TYPE_CHECKING:
    from torch import Tensor

_MANY_PROGRAMS = 8192
"""Thread blocks of one head each that a GPU runs at once, about; with more, each treats several heads."""
_SEVERAL_HEADS = 8
_FETCH_LINES = 512
"""Of a program that has lines fetched."""
_FETCH_BYTES = 24 << 20
"""Half of a second-level cache of 50 MB, as Hopper's."""


@triton.jit
def rotate_and_write(
    qkv,
    q_out,
    keys,
    values,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    slot_mapping,
    ahead_1,
    ahead_2,
    lines_1,
    lines_2,
    qkv_stride,
    q_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    WRITE: tl.constexpr,
    FETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Treat some heads of one token; program (token, heads), the heads being those of q, k and v.

    HALF is D / 2 rounded up to a power of two. Where FETCH is not 0, programs behind those of the heads
    have FETCH lines fetched each.
    """
    token = tl.program_id(0).to(tl.int64)
    if FETCH > 0:
        HEAD_PROGRAMS: tl.constexpr = (HEADS + 2 * KV_HEADS + BLOCK_H - 1) // BLOCK_H
        if tl.program_id(1) >= HEAD_PROGRAMS:
            number = (tl.program_id(1) - HEAD_PROGRAMS) * tl.num_programs(0) + tl.program_id(0)
            if PDL:
                gdc_launch_dependents()
            fetch_lines(ahead_1, ahead_2, lines_1, lines_2, number * FETCH, FETCH)
            if PDL:
                gdc_wait()
            return
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, HALF)[None, :]
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    inside = column < D // 2
    rotates = (is_query | is_key) & inside
    if PDL:
        gdc_launch_dependents()
    # Nothing since the last launch that waited for all before it has written these.
    position = tl.load(positions + token, cache_modifier=".cg").to(tl.int64)
    slot = tl.load(slot_mapping + token, cache_modifier=".cg").to(tl.int64)
    cos_1 = tl.load(cos + position * D + column, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + position * D + D // 2 + column, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + position * D + column, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + position * D + D // 2 + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()

    source = qkv + token * qkv_stride + head * D + column
    exists = (head < HEADS + 2 * KV_HEADS) & inside
    raw_1 = tl.load(source, mask=exists, other=0.0)
    raw_2 = tl.load(source + D // 2, mask=exists, other=0.0)
    first = raw_1.to(tl.float32)
    second = raw_2.to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        scale = 1.0 / tl.sqrt(squares / D + eps)
        for_q = tl.load(q_weight + column, mask=inside, other=0.0).to(tl.float32)
        for_k = tl.load(k_weight + column, mask=inside, other=0.0).to(tl.float32)
        first = first * scale * tl.where(is_query, for_q, for_k)
        for_q = tl.load(q_weight + D // 2 + column, mask=inside, other=0.0).to(tl.float32)
        for_k = tl.load(k_weight + D // 2 + column, mask=inside, other=0.0).to(tl.float32)
        second = second * scale * tl.where(is_query, for_q, for_k)
        # The projection, the norm and the rotation each round in PyTorch, and a cached key stays for long.
        first = first.to(raw_1.dtype).to(tl.float32)
        second = second.to(raw_2.dtype).to(tl.float32)
    turned_1 = tl.where(rotates, first * cos_1 + second * sin_1, 0.0).to(raw_1.dtype)
    turned_2 = tl.where(rotates, second * cos_2 + first * sin_2, 0.0).to(raw_2.dtype)

    target = q_out + token * q_stride + head * D + column
    tl.store(target, turned_1, mask=is_query & inside)
    tl.store(target + D // 2, turned_2, mask=is_query & inside)
    if not WRITE:
        tl.store(source, turned_1, mask=is_key & inside)
        tl.store(source + D // 2, turned_2, mask=is_key & inside)
        return
    if slot < 0:
        return
    line = keys + slot * (KV_HEADS * D) + (head - HEADS) * D + column
    tl.store(line, turned_1, mask=is_key & inside)
    tl.store(line + D // 2, turned_2, mask=is_key & inside)
    line = values + slot * (KV_HEADS * D) + (head - HEADS - KV_HEADS) * D + column
    tl.store(line, raw_1, mask=is_value & inside)
    tl.store(line + D // 2, raw_2, mask=is_value & inside)


@triton.jit
def fetch_lines(first, second, lines_1, lines_2, start, COUNT: tl.constexpr):
    """Have the second-level cache fetch some of the lines of two tensors, numbered one after the other."""
    line = tl.minimum(start + tl.arange(0, COUNT), lines_1 + lines_2 - 1)
    base = tl.where(line < lines_1, first.to(tl.int64), second.to(tl.int64))
    prefetch(base + tl.where(line < lines_1, line, line - lines_1).to(tl.int64) * LINE_BYTES)


def heads_per_program(num_tokens: int, num_heads: int) -> int:
    """Return how many heads a program treats: one while programs are few, so that none takes long.

    Nothing between: each number is a kernel to compile.

    Args:
        num_tokens: T.
        num_heads: of queries, keys and values together.
    """
    return 1 if num_tokens * num_heads <= _MANY_PROGRAMS else _SEVERAL_HEADS


def lines_ahead(tensors: tuple[Tensor, Tensor] | None) -> tuple[int, int]:
    """Return how many lines of each of two tensors are fetched: what there is room for, the first one's first."""
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
    q_out: Tensor | None = None,
    write: bool = True,
    ahead: tuple[Tensor, Tensor] | None = None,
    pdl: bool = False,
) -> Tensor:
    """Normalise queries and keys per head, rotate them, and write keys and values to their slots.

    Args:
        qkv: [T, (H + 2 * K) * D], contiguous in its rows.
        kv: [2, N, S, K, D] contiguous; index 0 keys, 1 values.
        rope: cos and sin, [positions, 1, D] contiguous each, as `rope_tables` makes them, in
            qkv's dtype.
        positions: [T] int64, rows of `rope`.
        slot_mapping: [T] int32 (int64 is taken too); -1 skips a token's key and value.
        norms: weights of the queries' and the keys' norm, [D] each; None where the family has none.
        eps: of the norms.
        q_out: [T, H, D], contiguous in a token; None writes the queries over those in `qkv`.
        write: False leaves the cache as it is: rotated keys are written over those in `qkv`.
        ahead: two tensors, read soon after, that the second-level cache is to fetch the first 24 MiB of.
        pdl: launch before the kernel before has ended. `positions` and `slot_mapping` are then read before
            the wait: what writes them must be followed by a launch without `pdl` before this one.

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
    keys, values = kv.unbind(0)
    half = triton.next_power_of_2(head_dim // 2)
    block = heads_per_program(tokens, heads + 2 * kv_heads)
    q_weight, k_weight = (qkv, qkv) if norms is None else norms
    lines = lines_ahead(ahead)
    programs = triton.cdiv(heads + 2 * kv_heads, block)
    programs += triton.cdiv(sum(lines), _FETCH_LINES * tokens)
    rotate_and_write[(tokens, programs)](
        qkv,
        q_out,
        keys,
        values,
        q_weight,
        k_weight,
        *rope,
        positions,
        slot_mapping,
        *((qkv, qkv) if ahead is None else ahead),
        *lines,
        qkv.stride(0),
        q_out.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        HALF=half,
        BLOCK_H=block,
        NORM=norms is not None,
        WRITE=write,
        FETCH=0 if ahead is None else _FETCH_LINES,
        num_warps=max(1, min(4, block * half // 128)),
        **dependent_launch(pdl),
    )
    return q_out
