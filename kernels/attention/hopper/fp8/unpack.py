"""Prefill over an FP8 cache on Hopper, in the queries' dtype: converts keys and values, then runs `prefill` on them.

The kernel's tensor cores read copied tiles in place, so a tile must be in the queries' dtype before it is copied. One
pass over the cache writes the keys and values of a step's sequences one after the other. It moves 5 bytes for an
element that attention then reads once for every 128 or 192 query rows.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.attention.hopper.fp8.cached_rows import convert_rows
from kernels.attention.hopper.prefill import HopperPrefill, attends_nothing
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch
from kernels.attention.splits import split_sequences

if TYPE_CHECKING:
    from kernels.attention.select import Selection


def _packed(batch: PagedBatch) -> PackedBatch:
    """Return the batch with its keys one sequence after the other."""
    starts = torch.zeros(batch.num_seqs + 1, dtype=torch.int32, device=batch.seq_lens.device)
    torch.cumsum(batch.seq_lens, 0, out=starts[1:])
    return PackedBatch(
        batch.cu_seqlens_q, starts, batch.num_tokens, batch.max_seqlen_q, batch.max_seqlen_k
    )


class UnpackedPrefill:
    """Prefill attention of one step over an FP8 cache on Hopper; shapes as in `kernels.prefill_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PagedBatch), "its row takes no packed keys"
        self._problem = problem
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        heads, dim = problem.num_kv_heads, problem.head_dim
        converted = dataclasses.replace(problem, kv_dtype=None, block_size=None)
        self._parts = []
        for part in split_sequences(problem, batch, self._dtype.itemsize):
            packed = _packed(part)
            self._parts.append((part, packed, HopperPrefill(converted, packed, selection)))
        rows = max((part.num_seqs for part, _, _ in self._parts), default=0) * batch.max_seqlen_k
        self._shape = 2, rows, heads, dim
        self._buffer: Tensor | None = None

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write the attention of `q` over `kv` to `out`.

        Raises:
            ShapeError: an address or a stride of `q` or `out` is not a multiple of 16 bytes.
        """
        assert kv_scale is not None, "check_scale raises for a float8 cache without scales"
        if attends_nothing(q, kv, out, lse):
            return
        if self._buffer is None:
            self._buffer = torch.empty(self._shape, dtype=self._dtype, device=q.device)
        for part, packed, attend in self._parts:
            convert_rows(self._problem, part, packed.cu_seqlens_k, kv, kv_scale, self._buffer)
            attend(q, self._buffer, out, lse)
