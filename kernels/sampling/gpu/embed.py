"""The vectors of a step's tokens, of which some are known only as rows of what the step before drew, in Triton.

Knows ids and rows of a table, nothing of a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

if TYPE_CHECKING:
    from torch import Tensor

_WARP_COLUMNS = 256
_MOST_WARPS = 8


@triton.jit
def gather_rows(ids, drawn, table, out, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy the row of one token; program (token)."""
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    row = tl.load(ids + token)
    if row < 0:
        row = tl.load(drawn - 1 - row)
    column = tl.arange(0, BLOCK)
    exists = column < C
    values = tl.load(table + row * C + column, mask=exists)
    tl.store(out + token * C + column, values, mask=exists)


def embed(ids: Tensor, drawn: Tensor | None, table: Tensor, *, pdl: bool = False) -> Tensor:
    """Look up the vectors of tokens.

    It waits for all that was launched before it.

    Args:
        ids: [T] int64 contiguous, rows of `table`, or -1 - i for the row that `drawn` has at i.
        drawn: [R] int64 contiguous, rows of `table`; None where no id is below 0.
        table: [V, C] contiguous.
        pdl: let the kernel behind it begin before it has ended.

    Returns:
        [T, C], a new tensor.
    """
    size = table.shape[1]
    out = torch.empty((len(ids), size), dtype=table.dtype, device=table.device)
    if len(ids) == 0:
        return out
    block = triton.next_power_of_2(size)
    gather_rows[(len(ids),)](
        ids,
        ids if drawn is None else drawn,
        table,
        out,
        C=size,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(_MOST_WARPS, max(1, block // _WARP_COLUMNS)),
    )
    return out
