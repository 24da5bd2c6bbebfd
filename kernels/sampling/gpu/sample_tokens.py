"""Samples a token for each row of logits in two launches, and in four where a row is filtered.

    rank_tiles > set_limits [ > weigh_tiles > sample_filtered ]

The first two read the logits once and sample all rows without filters: greedy ones by the argmax, others by that of the
logits with noise. The others find the tokens that filters keep and sample from these.

Neither the logits nor the host decide how often a kernel is launched, and sums are of integers: the bits of a row's
token do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.gpu.dependent_launch import dependent_launch
from kernels.sampling.gpu.argmax import TILE_WARPS, rank_tiles
from kernels.sampling.gpu.sample_filtered import sample_filtered
from kernels.sampling.gpu.sample_tiles import set_limits, weigh_tiles
from kernels.sampling.rows import FILTERED, SAMPLE_SIZES, SampleRow, SampleSizes

_ROW_WARPS = 8
_ROW_REGISTERS = 192
"""Registers per thread that ptxas may use: without a bound it spills some to get by with 128."""


class _Scratch(NamedTuple):
    """Intermediate results of the kernels.

    Attributes:
        best: [R, tiles] int64 keys.
        noisy: likewise, of sums of noise and logits.
        groups: [R, groups] int32, the `ranking_bits` of each group's largest logit.
        kinds: [R] int32, `GREEDY` where the row has no finite peak.
        peaks: [R] float32, the largest logit.
        limits: [R] float32, the largest distance of a candidate from the peak.
        counts: [R] int32, number of candidates.
        sums: [R, 2, tiles] int64, sums of weights: of all tokens, and of those that min_p keeps.
        listed: [R, capacity] int64, keys of candidates.
    """

    best: Tensor
    noisy: Tensor
    groups: Tensor
    kinds: Tensor
    peaks: Tensor
    limits: Tensor
    counts: Tensor
    sums: Tensor
    listed: Tensor


def _scratch(rows: int, size: int, sizes: SampleSizes, device: torch.device) -> _Scratch:
    tiles, groups = triton.cdiv(size, sizes.tile), triton.cdiv(size, sizes.group)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return _Scratch(
        best=empty(rows, tiles, dtype=torch.int64),
        noisy=empty(rows, tiles, dtype=torch.int64),
        groups=empty(rows, groups, dtype=torch.int32),
        kinds=empty(rows, dtype=torch.int32),
        peaks=empty(rows, dtype=torch.float32),
        limits=empty(rows, dtype=torch.float32),
        counts=empty(rows, dtype=torch.int32),
        sums=empty(rows, 2, tiles, dtype=torch.int64),
        listed=empty(rows, sizes.capacity, dtype=torch.int64),
    )


def sample_tokens(
    logits: Tensor,
    table: Tensor,
    masks: Tensor,
    kinds: Collection[int],
    tokens: Tensor,
    checked: Tensor,
    *,
    pdl: bool = False,
    sizes: SampleSizes = SAMPLE_SIZES,
) -> None:
    """Sample a token for each row of a table.

    Args:
        logits: [M, V], float32, bfloat16 or float16, contiguous in V. Not changed.
        table: [R, fields of `SampleRow`] float64 contiguous.
        masks: [K, ceil(V / 32)] int32 contiguous, K >= 0: bit i % 32 of word i // 32 is 1 where token i may be sampled.
        kinds: of the table's rows.
        tokens: [N] int64 contiguous, written at the rows' targets; valid ids whatever the logits.
        checked: [N] int64 contiguous, likewise; the same, but -1 where the largest logit is not finite.
        pdl: use programmatic dependent launch.
        sizes: tile sizes.
    """
    size, device = logits.shape[1], logits.device
    rows = len(table)
    stride = logits.stride(0)
    it = _scratch(rows, size, sizes, device)
    num_tiles, num_groups = it.best.shape[1], it.groups.shape[1]
    tiles = {"NUM_TILES": num_tiles, "TILES": triton.next_power_of_2(num_tiles)}
    launch = dependent_launch(pdl)
    wide, narrow = launch | {"num_warps": TILE_WARPS}, launch | {"num_warps": _ROW_WARPS}
    id_bits = max(1, (size - 1).bit_length())

    rank_tiles[(num_tiles, rows)](
        logits, table, masks, it.best, it.noisy, it.groups, it.best, stride,
        V=size, BLOCK=sizes.tile, GROUP=sizes.group, COLUMNS=len(SampleRow._fields), SUMS=False, **wide,
    )  # fmt: skip
    set_limits[(rows,)](
        table, it.best, it.noisy, it.groups, it.kinds, it.peaks, it.limits, it.counts, tokens, checked,
        NUM_GROUPS=num_groups, GROUPS=triton.next_power_of_2(num_groups), **tiles, **narrow,
    )  # fmt: skip
    if FILTERED not in kinds:
        return
    weigh_tiles[(num_tiles, rows)](
        logits, table, masks, it.kinds, it.peaks, it.limits, it.counts, it.sums, it.listed, stride,
        V=size, BLOCK=sizes.tile, CAPACITY=sizes.capacity, ID_BITS=id_bits, **wide,
    )  # fmt: skip
    sample_filtered[(rows,)](
        logits, table, masks, it.kinds, it.peaks, it.counts, it.sums, it.listed, tokens, checked, stride,
        V=size, CAPACITY=sizes.capacity, BLOCK=sizes.chunk, LOADS=sizes.loads, WAYS=sizes.ways,
        ROW_WAYS=sizes.row_ways, ID_BITS=id_bits, maxnreg=_ROW_REGISTERS, **tiles, **narrow,
    )  # fmt: skip
