"""Turns what the scheduler chose into the tensors of one forward pass.

Tokens lie packed, decode rows first, then the prefill chunks one after the other:

    row     0 .. B-1                B ..                        T-1
            one token per sequence  chunk of p0 | chunk of p1 | ...
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kernels import PagedBatch
from model.device.transfer import upload
from server.engine.runner.shared_prefix import shared_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from model.device.transfer import HostArray
    from server.engine.core.step import ScheduledSequence, SchedulerOutput
    from server.engine.runner.sampled_tokens import DrawnTokens
    from server.engine.runner.shared_prefix import SharingPays


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step's tokens on the device.

    Attributes:
        input_ids: [T] int64; below 0 for tokens that the step before drew, see `DrawnTokens.id_or_row`.
        positions: [T] int64, of each token in its sequence.
        slot_mapping: [T] int32, where each token's keys and values go.
        decode: the one-token sequences, in order of their rows; None without any.
        prefill: the other sequences; None without any.
        last_rows: [M] int64, the row of each sequence that samples, in the scheduler's order.
        drawn: [R] int64, what those tokens are; None where there is none of them.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    decode: PagedBatch | None
    prefill: PagedBatch | None
    last_rows: torch.Tensor
    drawn: torch.Tensor | None


def build_batch(
    output: SchedulerOutput,
    block_size: int,
    device: torch.device,
    drawn: DrawnTokens,
    sharing_pays: SharingPays | None = None,
) -> ModelInput:
    """Lay out one step.

    Args:
        output: at least one scheduled sequence; its blocks are reserved.
        block_size: S, tokens per block.
        device: where the tensors go.
        drawn: has the tokens that the host does not know yet.
        sharing_pays: asked whether to read once what the one-token sequences share; None where no
            kernel can.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_rows: list[int] = []
    for s in output.decode:
        start, table = s.start, s.sequence.block_table
        if s.samples:
            last_rows.append(len(ids))
        ids.append(drawn.id_or_row(s.sequence, start))
        positions.append(start)
        slots.append(table[start // block_size] * block_size + start % block_size)
    prompts = [prompt_rows(s, block_size) for s in output.prefill]
    end = len(ids)
    for s in output.prefill:
        end += s.num_tokens
        if s.samples:
            last_rows.append(end - 1)
    groups = [
        _host_batch(output.decode, block_size, sharing_pays),
        _host_batch(output.prefill, block_size, None),
    ]
    tensors = iter(
        upload(
            [
                np.concatenate([np.array(ids, np.int64), *(rows.ids for rows in prompts)]),
                np.concatenate(
                    [np.array(positions, np.int64), *(rows.positions for rows in prompts)]
                ),
                np.array(last_rows, np.int64),
                np.concatenate([np.array(slots, np.int32), *(rows.slots for rows in prompts)]),
                *(array for group in groups if group is not None for array in group.arrays),
            ],
            device,
        )
    )
    input_ids, position_ids, last, slot_mapping = itertools.islice(tensors, 4)
    decode, prefill = (None if group is None else group.on_device(tensors) for group in groups)
    known = drawn.ids if ids and min(ids) < 0 else None
    return ModelInput(input_ids, position_ids, slot_mapping, decode, prefill, last, known)


class PromptRows(NamedTuple):
    """The tokens of one chunk of a prompt: ids [n] int64, positions [n] int64, slots [n] int32."""

    ids: HostArray
    positions: HostArray
    slots: HostArray


def prompt_rows(scheduled: ScheduledSequence, block_size: int) -> PromptRows:
    """Lay out a chunk whose tokens the host knows.

    Args:
        scheduled: its blocks are reserved.
        block_size: tokens per block.
    """
    start, end = scheduled.start, scheduled.start + scheduled.num_tokens
    first = start // block_size
    blocks = np.array(scheduled.sequence.block_table[first : -(-end // block_size)], np.int32)
    positions = np.arange(start, end)
    slots = blocks[positions // block_size - first] * block_size + positions % block_size
    ids = np.array(scheduled.sequence.token_ids[start:end], np.int64)
    return PromptRows(ids, positions, slots.astype(np.int32))


class _HostBatch(NamedTuple):
    """A `PagedBatch` whose tensors, cu_seqlens_q, seq_lens and block_table, are still arrays."""

    arrays: tuple[HostArray, HostArray, HostArray]
    num_tokens: int
    max_seqlen_q: int
    max_seqlen_k: int
    shared_prefix: int

    def on_device(self, tensors: Iterator[torch.Tensor]) -> PagedBatch:
        """Take the three tensors that `arrays` became."""
        cu_seqlens_q, seq_lens, block_table = itertools.islice(tensors, 3)
        return PagedBatch(
            cu_seqlens_q,
            seq_lens,
            block_table,
            num_tokens=self.num_tokens,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            shared_prefix=self.shared_prefix,
            keys_settled=True,
        )


def _host_batch(
    scheduled: Sequence[ScheduledSequence], block_size: int, sharing_pays: SharingPays | None
) -> _HostBatch | None:
    if not scheduled:
        return None
    lengths = [s.start + s.num_tokens for s in scheduled]
    max_seqlen_k = max(lengths)
    # Tables hold blocks reserved for later tokens too; the kernel reads those of `lengths` alone.
    width = -(-max_seqlen_k // block_size)
    table = np.zeros((len(scheduled), width), np.int32)
    cu_seqlens = [0]
    for row, s in zip(table, scheduled, strict=True):
        blocks = s.sequence.block_table[:width]
        row[: len(blocks)] = blocks
        cu_seqlens.append(cu_seqlens[-1] + s.num_tokens)
    shared = 0
    if sharing_pays is not None:
        num_computed = min(s.start for s in scheduled)
        shared = shared_tokens(table, num_computed, block_size, sharing_pays)
    return _HostBatch(
        (np.array(cu_seqlens, np.int32), np.array(lengths, np.int32), table),
        num_tokens=cu_seqlens[-1],
        max_seqlen_q=max(s.num_tokens for s in scheduled),
        max_seqlen_k=max_seqlen_k,
        shared_prefix=shared,
    )
