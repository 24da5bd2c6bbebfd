"""From the output of a QKV projection straight to attention, where each sequence has one new token: one launch.

Norm per head, rotation, cache write and attention for few sequences, whose attention reads so little that launches
decide. A program attends to one split of a sequence's keys for the query heads of one key-value head, and rotates
these queries itself; that of the last split also treats the new key and value, attends to them from registers and
writes them to the cache. Keys and values of earlier steps are on their way before it waits for the projection. The
last program to arrive of a sequence and key-value head merges the splits.

Everything is of the shape [LINES, HALF]: a line of a few threads treats one key at a time, keeps a maximum, a sum and
an output of its own, and has all it needs in registers. Lines meet once, at the end.

Source: Dao et al., "Flash-Decoding", 2023; the last block merging as in Osama et al., "Stream-K", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.tile import window_argument
from kernels.fused.dependent import dependent_launch
from kernels.fused.device import fetch_lines, load_halves
from kernels.fused.rope_cache import FETCH_LINES, lines_ahead, load_heads
from kernels.fused.token_lines import (
    attend_new,
    attend_tile,
    load_tile,
    merge_lines,
    merge_parts,
    prepare,
    prepare_all,
    start_state,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.plan import AttentionProblem, PagedBatch
    from kernels.token_plan import TokenLaunch

_THREAD_ELEMENTS = 8
"""Of a head's half that a thread holds: 16 bytes."""


class TokenRoom(NamedTuple):
    """What launches leave for each other; they must follow one another on one stream.

    Attributes:
        arrivals: [rows * K] int32, 0 between launches: programs that have finished.
        partial_out: at least [rows * K * splits, H / K, D] float32.
        partial_lse: at least [rows * K * splits, H / K] float32, units of log2.
    """

    arrivals: Tensor
    partial_out: Tensor
    partial_lse: Tensor


@triton.jit(do_not_specialize=["table_stride", "window", "lines_1", "lines_2"])
def attend_token(
    qkv,
    out,
    keys,
    values,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    slot_mapping,
    seq_lens,
    block_table,
    arrivals,
    partial_out,
    partial_lse,
    ahead_1,
    ahead_2,
    lines_1,
    lines_2,
    table_stride,
    qkv_stride,
    eps,
    scale,
    window,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    LOOPS: tl.constexpr,
    NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one split; program (sequence and key-value head, split).

    HALF is D / 2 rounded up to a power of two. A line treats DEPTH keys of a tile. Unless LOOPS, a split is at most
    one tile. Where FETCH is not 0, programs behind those of the splits have FETCH lines fetched each.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    BLOCK_N: tl.constexpr = LINES * DEPTH
    if PDL:
        gdc_launch_dependents()
    if FETCH > 0:
        column_of_fetchers = tl.program_id(1) - SPLITS
        if column_of_fetchers >= 0:
            fetcher = column_of_fetchers * tl.num_programs(0) + tl.program_id(0)
            fetch_lines(ahead_1, ahead_2, lines_1, lines_2, fetcher * FETCH, FETCH)
            return
    seq = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    number = tl.program_id(1)
    # Nothing since the last launch that waited for all before it has written these, nor earlier tokens' keys.
    num_keys = tl.load(seq_lens + seq, cache_modifier=".cg")
    first_tile = 0
    if WINDOW:
        first_tile = tl.maximum(num_keys - window, 0) // BLOCK_N
    tiles = (num_keys + BLOCK_N - 1) // BLOCK_N - first_tile
    count = tl.maximum(tl.minimum(tiles, SPLITS), 1)
    if number >= count:
        return
    begin = (first_tile + number * tiles // count) * BLOCK_N
    end = tl.minimum((first_tile + (number + 1) * tiles // count) * BLOCK_N, num_keys - 1)
    first_seen = 0
    if WINDOW:
        first_seen = num_keys - window
    row = tl.arange(0, LINES)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (column < D // 2) & (row >= 0)
    wide = row * 0 + column
    table = block_table + seq.to(tl.int64) * table_stride
    k_base = keys + kv_head * D
    v_base = values + kv_head * D
    STRIDE: tl.constexpr = KV_HEADS * D
    tile = load_tile(
        k_base, v_base, table, begin, first_seen, end, row, column,
        STRIDE, D, BLOCK_SIZE, LINES, DEPTH,
    )  # fmt: skip
    slot = tl.load(slot_mapping + seq, cache_modifier=".cg").to(tl.int64)
    position = tl.load(positions + seq, cache_modifier=".cg").to(tl.int32)
    cosine = tl.load(cos + position * D + wide, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + position * D + D // 2 + wide, mask=inside, other=0.0).to(tl.float32)
    gains = (cosine, cosine)
    k_gains = (cosine, cosine)
    if NORM:
        gains = load_halves(q_weight + wide, inside, D)
        k_gains = load_halves(k_weight + wide, inside, D)
    if PDL:
        gdc_wait()

    projected = qkv + seq.to(tl.int64) * qkv_stride + wide
    raw = load_heads(projected + kv_head * GROUP * D, inside, GROUP, D, GROUP)
    raw_2 = load_heads(projected + kv_head * GROUP * D + D // 2, inside, GROUP, D, GROUP)
    projected += (HEADS + kv_head) * D
    k_1, k_2 = load_halves(projected, inside, D)
    v_1, v_2 = load_halves(projected + STRIDE, inside, D)
    q = prepare_all(raw, raw_2, gains, cosine, sine, eps, GROUP, D, NORM)
    state = start_state(GROUP, LINES, HALF)
    if number == count - 1:
        k_1, k_2 = prepare(k_1, k_2, k_gains, cosine, sine, eps, D, NORM)
        state = attend_new(
            state, q, k_1, k_2, v_1, v_2, (row == 0) & (num_keys > 0), scale, softcap,
            GROUP, SOFTCAP,
        )  # fmt: skip
        place = slot * STRIDE + wide
        writes = inside & (row == 0) & (slot >= 0)
        tl.store(k_base + place, k_1, mask=writes)
        tl.store(k_base + D // 2 + place, k_2, mask=writes)
        tl.store(v_base + place, v_1, mask=writes)
        tl.store(v_base + D // 2 + place, v_2, mask=writes)
    if LOOPS:
        for start in range(begin, end, BLOCK_N):
            following = load_tile(
                k_base, v_base, table, start + BLOCK_N, first_seen, end, row, column,
                STRIDE, D, BLOCK_SIZE, LINES, DEPTH,
            )  # fmt: skip
            state = attend_tile(
                state, q, tile, start, first_seen, end, scale, softcap,
                GROUP, LINES, DEPTH, SOFTCAP,
            )  # fmt: skip
            tile = following
    else:
        state = attend_tile(
            state, q, tile, begin, first_seen, end, scale, softcap, GROUP, LINES, DEPTH, SOFTCAP
        )

    half = tl.arange(0, HALF)
    is_half = half < D // 2
    out_row = out + (seq * HEADS + kv_head * GROUP).to(tl.int64) * D
    first_part = tl.program_id(0) * SPLITS
    part = (first_part + number).to(tl.int64) * GROUP
    for g in tl.static_range(GROUP):
        first, second, log_sum = merge_lines(state[0][g], state[1][g], state[2][g], state[3][g])
        if count == 1:
            tl.store(out_row + g * D + half, first.to(out.dtype.element_ty), mask=is_half)
            tl.store(out_row + g * D + D // 2 + half, second.to(out.dtype.element_ty), mask=is_half)
        else:
            tl.store(partial_out + (part + g) * D + half, first, mask=is_half)
            tl.store(partial_out + (part + g) * D + D // 2 + half, second, mask=is_half)
            tl.store(partial_lse + part + g, log_sum)
    if count > 1:
        # All of this program's stores, by all of its threads, come before its arrival is counted.
        tl.debug_barrier()
        counter = arrivals + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
            tl.store(counter, 0)  # for the next layer
            for g in tl.static_range(GROUP):
                first, second = merge_parts(
                    partial_out, partial_lse, first_part, count, g, row, column,
                    GROUP, D, HALF, LINES, SPLITS,
                )  # fmt: skip
                place = out_row + g * D + half
                tl.store(place, first.to(out.dtype.element_ty), mask=is_half)
                tl.store(place + D // 2, second.to(out.dtype.element_ty), mask=is_half)


def lines_of(num_warps: int, half: int) -> int:
    """Return how many keys the threads of a program treat at once, a half of HALF elements 16 bytes a thread."""
    return max(1, num_warps * 32 * _THREAD_ELEMENTS // half)


def attend_tokens(
    qkv: Tensor,
    kv: Tensor,
    rope: tuple[Tensor, Tensor],
    positions: Tensor,
    slot_mapping: Tensor,
    batch: PagedBatch,
    problem: AttentionProblem,
    launch: TokenLaunch,
    room: TokenRoom,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    ahead: tuple[Tensor, Tensor] | None = None,
    pdl: bool = False,
) -> Tensor:
    """Normalise, rotate and write the new tokens of a step, and attend with them.

    Args:
        qkv: [B, (H + 2 * K) * D], contiguous in its rows, one row for each sequence.
        kv: [2, N, S, K, D] contiguous; index 0 keys, 1 values.
        rope: as `rope_and_write_kv` takes it, as are `positions`, `norms`, `eps` and `ahead`.
        positions: [B] int64.
        slot_mapping: [B] int32 (int64 is taken too); of a sequence's last token, or -1 to write nothing.
        batch: one query token for each sequence; its row of a sequence without tokens becomes 0.
        problem: that `kernels.token_plan.select_token` accepts.
        launch: from there, for at least `batch.max_seqlen_k` keys.
        room: large enough for `launch`.
        pdl: launch before the kernel before has ended. All but `qkv` is then read before the wait: what wrote it must
            be followed by a launch without `pdl` before this one.

    Returns:
        [B, H, D], a new tensor.
    """
    rows, (kv_heads, head_dim) = len(qkv), kv.shape[3:]
    heads = problem.num_heads
    out = torch.empty((rows, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    half = triton.next_power_of_2(head_dim // 2)
    lines = lines_of(launch.num_warps, half)
    keys, values = kv.unbind(0)
    q_weight, k_weight = (qkv, qkv) if norms is None else norms
    # A window begins anywhere in a tile.
    reach = min(
        batch.max_seqlen_k, (problem.sliding_window or batch.max_seqlen_k) + lines * launch.depth
    )
    fetched = lines_ahead(ahead)
    fetchers = triton.cdiv(sum(fetched), FETCH_LINES * rows * kv_heads)
    attend_token[(rows * kv_heads, launch.splits + fetchers)](
        qkv,
        out,
        keys,
        values,
        q_weight,
        k_weight,
        *rope,
        positions,
        slot_mapping,
        batch.seq_lens,
        batch.block_table,
        *room,
        *((qkv, qkv) if ahead is None else ahead),
        *fetched,
        batch.block_table.stride(0),
        qkv.stride(0),
        eps,
        problem.softmax_scale,
        window_argument(problem),
        problem.softcap or 0.0,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        D=head_dim,
        HALF=half,
        BLOCK_SIZE=problem.block_size,
        LINES=lines,
        DEPTH=launch.depth,
        SPLITS=launch.splits,
        LOOPS=reach > launch.splits * lines * launch.depth,
        NORM=norms is not None,
        WINDOW=problem.sliding_window is not None,
        SOFTCAP=problem.softcap is not None,
        FETCH=0 if ahead is None else FETCH_LINES,
        num_warps=launch.num_warps,
        **dependent_launch(pdl),
    )
    return out
