"""The first launch of a cascade in Triton: attention of every query token of a decode to the shared keys.

All query tokens of the batch are rows of one problem, so a tile of keys is read once per tile of rows instead of once
per sequence. The keys are split over programs until the GPU is full. The kernel writes all partial results, and
`combine` merges them with those of each sequence's other keys. The number of splits depends only on values that the
host knows, so the device makes no list.

There is no causal mask, since the shared tokens come before every query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.attention.portable.tile import (
    LN_2,
    attend,
    check_head_stride,
    load_rows,
    normalize,
    scale_arguments,
    store_rows,
    tile_constants,
)
from kernels.attention.problem import PagedBatch
from kernels.attention.splits import prefix_parts, splits_wanted

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.problem import AttentionProblem, PackedBatch
    from kernels.attention.select import Selection


@triton.jit(do_not_specialize=["num_seqs", "num_keys", "num_parts", "row_tiles", "lines"])
def prefix(
    q,
    k,
    v,
    k_scale,
    v_scale,
    out,
    lse,
    cu_seqlens_q,
    block_table,
    num_seqs,
    num_keys,
    num_parts,
    row_tiles,
    lines,
    q_stride,
    q_head_stride,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    FP8: tl.constexpr,
):
    """Compute attention of one row tile over one part of the keys; program (part, key-value head, row tile).

    The row tiles of a part are adjacent programs, since they read the same keys.
    """
    program = tl.program_id(0)
    first_row = program % row_tiles * BLOCK_M
    kv_head = program // row_tiles % KV_HEADS
    part = program // (row_tiles * KV_HEADS)
    num_tokens = tl.load(cu_seqlens_q + num_seqs)
    if first_row >= num_tokens * GROUP:
        return
    tiles = (num_keys + BLOCK_N - 1) // BLOCK_N
    begin = part * tiles // num_parts * BLOCK_N
    end = tl.minimum((part + 1) * tiles // num_parts * BLOCK_N, num_keys)

    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    exists = token < num_tokens
    head = kv_head * GROUP + row % GROUP
    q_row = token.to(tl.int64)
    q_tile = load_rows(q, q_row * q_stride + head * q_head_stride, exists, D1, D2, True)
    stride: tl.constexpr = KV_HEADS * (D1 + D2)
    acc1, acc2, m, total = attend(
        q_tile,
        k + kv_head * (D1 + D2),
        v + kv_head * (D1 + D2),
        (k_scale + kv_head * BLOCK_SIZE, v_scale + kv_head * BLOCK_SIZE, KV_HEADS * BLOCK_SIZE),
        block_table,
        begin, end, num_keys, row, num_keys - 1, num_keys - 1,
        stride, stride, scale, 0, softcap,
        True, False, False, SOFTCAP, ONE_LOOP, BLOCK_SIZE, BLOCK_M, BLOCK_N, D1, D2, FP8,
    )  # fmt: skip
    acc1, acc2, log_sum = normalize(acc1, acc2, m, total)
    line = part.to(tl.int64) * lines + q_row * HEADS + head
    store_rows(out, line * (D1 + D2), exists, acc1, acc2, D1, D2)
    tl.store(lse + line, log_sum * LN_2, mask=exists)


class PortablePrefix:
    """Attention of one step to the shared tokens, on a GPU.

    Attributes:
        num_parts: P, the number of partial results per row.
    """

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PagedBatch), "a shared prefix needs a paged cache"
        assert batch.shared_prefix > 0
        launch = selection.launch_for(batch.shared_prefix, batch.num_seqs)
        row_tiles = -(-batch.num_tokens * problem.group_size // launch.block_m)
        tiles = problem.num_kv_heads * row_tiles
        wanted = splits_wanted(selection.arch.num_sms, launch.programs_per_sm, max(1, tiles))
        self.num_parts = prefix_parts(batch.shared_prefix, launch.block_n, wanted)
        self._grid = (self.num_parts * tiles,)
        self._row_tiles = row_tiles
        self._problem = problem
        self._batch = batch
        self._constants = {
            **tile_constants(problem, launch),
            "KV_HEADS": problem.num_kv_heads,
            "ONE_LOOP": launch.one_loop,
        }

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write P partial results for every row.

        Args:
            q: [T, H, D] as in `kernels.decode_attention`.
            kv: as in `kernels.decode_attention`.
            out: [P, L, D] float32 contiguous, L at least T * H; row h of token t is at t * H + h.
            lse: [P, L] float32 contiguous, natural logarithm.
            kv_scale: as in `kernels.decode_attention`.
        """
        assert lse is not None, "parts cannot be merged without their log-sum-exp"
        check_head_stride(q)
        batch = self._batch
        prefix[self._grid](
            q,
            *kv.unbind(0),
            *scale_arguments(kv, kv_scale),
            out,
            lse,
            batch.cu_seqlens_q,
            batch.block_table,
            batch.num_seqs,
            batch.shared_prefix,
            self.num_parts,
            self._row_tiles,
            lse.shape[1],
            q.stride(0),
            q.stride(1),
            self._problem.softmax_scale,
            self._problem.softcap or 0.0,
            **self._constants,
        )
