"""Embedding lookup of tokens; some are given as indices into the tokens that the previous step sampled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

_WARP_COLUMNS = 256
_MOST_WARPS = 8


@triton.jit
def gather_rows(ids, sampled, table, out, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy the row of one token; program (token)."""
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    row = tl.load(ids + token)
    if row < 0:
        row = tl.load(sampled - 1 - row)
    column = tl.arange(0, BLOCK)
    exists = column < C
    values = tl.load(table + row * C + column, mask=exists)
    tl.store(out + token * C + column, values, mask=exists)


def embed(ids: Tensor, sampled: Tensor | None, table: Tensor, *, pdl: bool = False) -> Tensor:
    """Look up the embeddings of tokens, after everything launched before has completed.

    Args:
        ids: [T] int64 contiguous, rows of `table`, or -1 - i for row `sampled[i]`.
        sampled: [R] int64 contiguous, rows of `table`; None where no id is below 0.
        table: [V, C] contiguous.
        pdl: let the next kernel start before this one has ended.

    Returns:
        [T, C], a new tensor.
    """
    size = table.shape[1]
    out = torch.empty((len(ids), size), dtype=table.dtype, device=table.device)
    if len(ids) == 0:
        return out
    block = triton.next_power_of_2(size)
    gather_rows[(len(ids),)](
        ids, ids if sampled is None else sampled, table, out,
        C=size, BLOCK=block, PDL=pdl, num_warps=min(_MOST_WARPS, max(1, block // _WARP_COLUMNS)),
    )  # fmt: skip
    return out
