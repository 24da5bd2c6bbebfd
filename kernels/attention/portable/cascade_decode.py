"""Cascade attention: a decode whose sequences begin with the same blocks reads those blocks once.

    prefix    attention of every query token to the shared tokens, in several parts      PrefixKernel
    rest      attention of each query token to the rest of its own sequence              the decode row's kernel
    merge     merges the parts and the rest by log-sum-exp into the output               combine_parts

All partial results are float32, so that only the merged output is rounded. `kernels.attention.cascade` decides
when a cascade is used.

Source: Juravsky et al., "Hydragen", 2024; Ye et al., "Cascade Inference", 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kernels.attention.portable.combine import combine_parts
from kernels.attention.portable.tile import split_head_dim

if TYPE_CHECKING:
    from kernels.attention.plan import AttentionKernel
    from kernels.attention.problem import AttentionProblem, PagedBatch

_ROWS = 4
"""Rows that a program merges. A decode has few rows, and each has several parts."""
_ELEMENTS = 8192
"""Elements of partial results that a program holds at once: 64 registers per thread with 4 warps."""


class PrefixKernel(Protocol):
    """Computes attention of every query token of a batch to the tokens that its sequences share.

    Attributes:
        num_parts: P, the number of partial results that it writes for each row.
    """

    num_parts: int

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write [P, L, D] and [P, L] float32; row h of token t is at t * H + h, as for `PortablePrefix`."""


class CascadeDecode:
    """Cascade attention of one decode step on a GPU; shapes as in `kernels.decode_attention`.

    Args:
        problem: the decode.
        batch: all tokens, including the shared ones.
        prefix: kernel for the shared tokens.
        rest: kernel for the tokens after them; it writes the log-sum-exp.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        batch: PagedBatch,
        prefix: PrefixKernel,
        rest: AttentionKernel,
    ) -> None:
        self._prefix, self._rest, self._batch = prefix, rest, batch
        rows = batch.num_tokens * problem.num_heads
        self._tiles = -(-rows // _ROWS)
        self._num_parts = prefix.num_parts + 1
        lines = (self._num_parts, self._tiles * _ROWS)
        device = batch.seq_lens.device
        self._partial_out = torch.empty((*lines, problem.head_dim), device=device)
        self._partial_lse = torch.empty(lines, device=device)
        shape = (batch.num_tokens, problem.num_heads)
        self._rest_out = self._partial_out[-1, :rows].view(*shape, problem.head_dim)
        self._rest_lse = self._partial_lse[-1, :rows].view(shape)
        d1, d2 = split_head_dim(problem.head_dim)
        self._constants = {
            "HEADS": problem.num_heads,
            "D1": d1,
            "D2": d2,
            "ROWS": _ROWS,
            "PARTS": max(1, min(16, _ELEMENTS // (_ROWS * d1))),
            "LSE": problem.lse,
            "num_warps": 4,
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
        """Write the attention of `q` over `kv` to `out`."""
        cache = {} if kv_scale is None else {"kv_scale": kv_scale}
        self._prefix(q, kv, self._partial_out[:-1], self._partial_lse[:-1], **cache)
        self._rest(q, kv, self._rest_out, self._rest_lse, **cache)
        self.merge(out, lse)

    def merge(self, out: Tensor, lse: Tensor | None = None) -> None:
        """Merge the partial results of the two kernels into `out` and `lse`."""
        combine_parts[(self._tiles,)](
            self._partial_out, self._partial_lse, out, out if lse is None else lse, self._batch.cu_seqlens_q,
            self._batch.num_seqs, self._num_parts, self._tiles,
            **self._constants,
        )  # fmt: skip
