"""The factories of the registry's PyTorch rows, and their support for a quantized cache.

PyTorch's attention does not support float8. So the blocks that a step reads are copied, converted and multiplied by
their scales, a few sequences at a time, and the row's kernel reads each copy.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kernels.attention.problem import AttentionProblem, PagedBatch, Phase
from kernels.attention.pytorch.common import check_blocks
from kernels.attention.pytorch.decode import TorchDecode
from kernels.attention.pytorch.paged_host import host_sequences
from kernels.attention.pytorch.prefill import TorchPrefill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.attention.plan import AttentionKernel
    from kernels.attention.select import Selection

COPIED_BYTES = 64 * 1024 * 1024
"""Most bytes of float32 copied at once, unless a single sequence needs more. It limits the memory of a step with
many sequences."""


class _Part(NamedTuple):
    """Consecutive sequences of a step: their rows, the blocks that are copied, and their kernel."""

    rows: slice
    blocks: Tensor
    attend: AttentionKernel


class _Read(NamedTuple):
    """A sequence's index, the block ids it reads, and the index of the first of them in its block table."""

    seq: int
    blocks: list[int]
    first: int


def make_prefill(
    problem: AttentionProblem, batch: PagedBatch, selection: Selection | None = None
) -> AttentionKernel:
    """Plan one step's prefill attention."""
    if problem.kv_dtype is None:
        return TorchPrefill(problem, batch, selection)
    return Dequantized(problem, batch, selection)


def make_decode(
    problem: AttentionProblem, batch: PagedBatch, selection: Selection | None = None
) -> AttentionKernel:
    """Plan one step's decode attention."""
    if problem.kv_dtype is None:
        return TorchDecode(problem, batch, selection)
    return Dequantized(problem, batch, selection)


class Dequantized:
    """Attention of one step over a float8 cache; shapes as in `kernels.attention.functional`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch, selection: Selection | None = None
    ) -> None:
        host_sequences(problem, batch)  # raises ShapeError if the batch is inconsistent
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        offsets: list[int] = batch.cu_seqlens_q.tolist()
        reads = _blocks_read(problem, batch, offsets)
        self._needed = 1 + max((block for read in reads for block in read.blocks), default=-1)
        plain = dataclasses.replace(problem, kv_dtype=None)
        make = make_decode if problem.phase is Phase.DECODE else make_prefill
        self._parts = []
        for part in _divide(problem, reads):
            begin, end = part[0].seq, part[-1].seq + 1
            rows = slice(offsets[begin], offsets[end])
            ids = [block for read in part for block in read.blocks]
            self._parts.append(
                _Part(
                    rows,
                    torch.tensor(ids, dtype=torch.int64, device=batch.block_table.device),
                    make(plain, _renumbered(batch, part, rows), selection),
                )
            )

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
        assert lse is None, "the row does not support it"
        assert kv_scale is not None, "check_scale raises for a float8 cache without scales"
        check_blocks(kv, self._needed)
        for part in self._parts:
            # As bytes, because PyTorch cannot copy float8 by index.
            numbers = kv.view(torch.uint8).index_select(1, part.blocks).view(kv.dtype).float()
            numbers *= kv_scale.index_select(1, part.blocks).transpose(2, 3)[..., None]
            part.attend(q[part.rows], numbers.to(self._dtype), out[part.rows])


def _blocks_read(problem: AttentionProblem, batch: PagedBatch, offsets: list[int]) -> list[_Read]:
    """Find the blocks of each sequence that contain tokens visible to its queries."""
    size, window = problem.block_size, problem.sliding_window
    assert size is not None, "packed keys and values are not quantized"
    lengths: list[int] = batch.seq_lens.tolist()
    tables: list[list[int]] = batch.block_table.tolist()
    reads = []
    for index, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        queries = offsets[index + 1] - offsets[index]
        first = 0 if window is None else max(0, length - queries - window + 1) // size
        last = -(-length // size) if queries else first
        reads.append(_Read(index, table[first:last], first))
    return reads


def _divide(problem: AttentionProblem, reads: list[_Read]) -> Iterator[list[_Read]]:
    """Group consecutive sequences whose copies together need at most `COPIED_BYTES`."""
    assert problem.block_size is not None
    block_bytes = 8 * problem.block_size * problem.num_kv_heads * problem.head_dim
    part: list[_Read] = []
    copied = 0
    for read in reads:
        num_bytes = len(read.blocks) * block_bytes
        if part and copied + num_bytes > COPIED_BYTES:
            yield part
            part, copied = [], 0
        part.append(read)
        copied += num_bytes
    if part:
        yield part


def _renumbered(batch: PagedBatch, part: list[_Read], rows: slice) -> PagedBatch:
    """Return the batch of the sequences in `part`, with blocks numbered in the order of their copies."""
    begin, end = part[0].seq, part[-1].seq + 1
    width = max(read.first + len(read.blocks) for read in part)
    table = torch.zeros((len(part), width), dtype=torch.int32)
    copied = 0
    for line, read in zip(table, part, strict=True):
        count = len(read.blocks)
        line[read.first : read.first + count] = torch.arange(copied, copied + count)
        copied += count
    return dataclasses.replace(
        batch,
        cu_seqlens_q=batch.cu_seqlens_q[begin : end + 1] - batch.cu_seqlens_q[begin],
        seq_lens=batch.seq_lens[begin:end],
        block_table=table.to(batch.block_table.device),
        num_tokens=rows.stop - rows.start,
        shared_prefix=0,
    )
