"""Decode attention over the paged cache in PyTorch: the kernel for the CPU, and the fallback for every GPU.

Long sequences are read in place. Short or scattered ones are gathered first, several sequences at a time, because a
call takes longer than copying them.

    blocks of a sequence     7 8 9 | 3 4        two runs of consecutive slots
    in place                 attend(7 8 9), attend(3 4), merge by log-sum-exp
    gathered                 copy slots of several sequences to [b, n, K, D], padded; attend once

The query heads of one key-value head are the rows of one small matrix, which is 7 times faster than
one row per query head and needs no copy of the keys.

Source: docs/decisions/0003-cpu-decode-attention.md for the choice and its measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.attention.pytorch.common import RunView, check_blocks, dense_attention
from kernels.attention.pytorch.paged_host import HostSequence, blocks_needed, host_sequences
from kernels.torch_private import cpu_attention_with_lse

if TYPE_CHECKING:
    from kernels.attention.problem import AttentionProblem, PagedBatch
    from kernels.attention.select import Selection

_KIB = 1024
_CALL_COST_BYTES = 256 * _KIB
"""Keys and values that one thread can copy in the time of one attention call.

Measured on an EPYC 9005 core: a call takes 11 us before it reads anything.
"""
_CALL_COST_BYTES_THREADED = 1024 * _KIB
"""The same with several threads, which a call must wake: 512 KiB if idle threads spin, as OpenMP's do by
default, and 2 MiB if they sleep (`OMP_WAIT_POLICY=PASSIVE`). The value lies between the two.
"""
_GROUP_BYTES = 4096 * _KIB
"""Most bytes gathered at once, so that they are still in the processor's cache when attention reads them."""
_GPU_CALL_COST_BYTES = 16384 * _KIB
_GPU_GROUP_BYTES = 262144 * _KIB


_GATHER_CALLS = 2.3
"""A gathered call takes about as long as this many calls in place, before it copies anything: 25 us."""
_MERGE_CALLS = 1
"""Merging the partial results of runs takes about as long as one more call."""
_PADDING_COST = 3
"""A padding token is copied and then attended to, which takes about twice as long as copying it."""


class Gather(NamedTuple):
    """Sequences whose keys and values are copied together and processed by one attention call.

    Attributes:
        rows: [b] int64 query rows; None for all rows in order.
        slots: [b * n] int64 cache slots; a shorter sequence repeats one of its own slots, so that
            no slot outside the sequences is read.
        mask: [b, 1, 1, n] additive; None if all sequences have n tokens.
        num_seqs: b.
    """

    rows: Tensor | None
    slots: Tensor
    mask: Tensor | None
    num_seqs: int


def divide(
    sequences: list[HostSequence], token_bytes: int, call_bytes: int, group_bytes: int
) -> tuple[list[HostSequence], list[list[HostSequence]]]:
    """Decide which sequences to read in place and which to gather together.

    Args:
        sequences: in order of their rows.
        token_bytes: bytes of one token's key and value.
        call_bytes: bytes that can be copied in the time of one attention call.
        group_bytes: most bytes gathered at once.

    Returns:
        The sequences read in place, with a call per run; and the groups, with one call each. A group takes less
        time than the calls of its sequences would, including copies and padding.
    """

    def gain(sequence: HostSequence, longest: int) -> int:
        """Return the time that joining a group saves, in bytes that can be copied in that time."""
        num_runs = len(sequence.runs)
        calls = num_runs + (_MERGE_CALLS if num_runs > 1 else 0)
        padding = _PADDING_COST * (longest - sequence.num_keys)
        return calls * call_bytes - (sequence.num_keys + padding) * token_bytes

    in_place: list[HostSequence] = []
    groups: list[list[HostSequence]] = []
    for sequence in sorted(sequences, key=lambda item: -item.num_keys):
        longest = groups[-1][0].num_keys if groups else 0
        if gain(sequence, sequence.num_keys) <= 0:
            in_place.append(sequence)
        elif (
            groups
            and gain(sequence, longest) > 0
            and _PADDING_COST * (longest - sequence.num_keys) * token_bytes <= call_bytes
            and (len(groups[-1]) + 1) * longest * token_bytes <= group_bytes
        ):
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    gathered: list[list[HostSequence]] = []
    for group in groups:
        total = sum(gain(sequence, group[0].num_keys) for sequence in group)
        if total > _GATHER_CALLS * call_bytes:
            gathered.append(group)
        else:
            in_place += group
    return in_place, gathered


class TorchDecode:
    """Decode attention of one step; shapes as in `kernels.decode_attention`.

    `call_bytes` overrides the measured time of a call: with 0 every run is read in place, with a large
    number all sequences are gathered.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        batch: PagedBatch,
        selection: Selection | None = None,
        call_bytes: int | None = None,
    ) -> None:
        del selection
        sequences = host_sequences(problem, batch)
        num_seqs = batch.seq_lens.shape[0]
        device = batch.seq_lens.device
        dtype: torch.dtype = getattr(torch, problem.dtype)
        on_cpu = device.type == "cpu"
        if call_bytes is None and on_cpu:
            threaded = torch.get_num_threads() > 1
            call_bytes = _CALL_COST_BYTES_THREADED if threaded else _CALL_COST_BYTES
        elif call_bytes is None:
            call_bytes = _GPU_CALL_COST_BYTES
        group_bytes = _GROUP_BYTES if on_cpu else _GPU_GROUP_BYTES
        token_bytes = 2 * problem.num_kv_heads * problem.head_dim * dtype.itemsize
        # Merging partial results needs their log-sum-exp. Only PyTorch's CPU attention returns it, and
        # problems with a softcap do not use that function.
        can_merge = on_cpu and problem.softcap is None
        in_place, groups = divide(sequences, token_bytes, call_bytes, group_bytes)
        if not can_merge:
            groups += [[item] for item in in_place if len(item.runs) > 1]
            in_place = [item for item in in_place if len(item.runs) == 1]
        self._problem = problem
        self._blocks_needed = blocks_needed(sequences, problem)
        self._num_seqs = num_seqs
        self._has_empty = len(sequences) < num_seqs
        self._in_place = [
            (item.row, tuple(RunView.of(run, problem) for run in item.runs)) for item in in_place
        ]
        self._gathers = [_gather(group, num_seqs, dtype, device) for group in groups]
        most = max((gather.slots.numel() for gather in self._gathers), default=0)
        row = problem.num_kv_heads * problem.head_dim
        # Allocated once per step: a new buffer per layer would cause page faults every time.
        # Not an inference tensor, even if planned in inference mode, so that the plan can run outside that mode.
        with torch.inference_mode(mode=False):
            self._scratch = torch.empty((2, most, row), dtype=dtype, device=device)

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
        assert kv_scale is None, "this kernel reads no quantized cache"
        check_blocks(kv, self._blocks_needed)
        if self._has_empty:
            out[: self._num_seqs].zero_()
        if self._in_place:
            self._attend_in_place(q, kv, out)
        for gather in self._gathers:
            self._attend_gathered(gather, q, kv, out)

    def _attend_in_place(self, q: Tensor, kv: Tensor, out: Tensor) -> None:
        problem = self._problem
        queries, results = self._rows(q), self._rows(out)
        for row, views in self._in_place:
            if len(views) == 1:
                keys, values = views[0].read(kv)
                result = dense_attention(queries[row], keys, values, problem)
            else:
                result = _merge_runs(queries[row], kv, views, problem.softmax_scale)
            results[row].copy_(result)

    def _rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split [B, H, D] into B of [1, K, G, D]."""
        heads = (1, self._problem.num_kv_heads, self._problem.group_size, self._problem.head_dim)
        if x.shape[0] == 1:
            return (x.view(heads),)
        return x.view(-1, *heads).unbind(0)

    def _attend_gathered(self, gather: Gather, q: Tensor, kv: Tensor, out: Tensor) -> None:
        problem = self._problem
        scratch = self._scratch
        count = gather.slots.numel()
        cache = kv.view(2, -1, scratch.shape[2])
        shape = (gather.num_seqs, -1, problem.num_kv_heads, problem.head_dim)
        keys, values = (
            torch.index_select(cache[side], 0, gather.slots, out=scratch[side, :count])
            .view(shape)
            .transpose(1, 2)
            for side in (0, 1)
        )
        # Rows from num_seqs on are padding.
        queries = q[: gather.num_seqs] if gather.rows is None else q.index_select(0, gather.rows)
        queries = queries.view(gather.num_seqs, problem.num_kv_heads, problem.group_size, -1)
        result = dense_attention(queries, keys, values, problem, gather.mask)
        if gather.rows is None:
            out[: gather.num_seqs].view(result.shape).copy_(result)
        else:
            out.index_copy_(0, gather.rows, result.reshape(-1, *out.shape[1:]))


def _gather(
    group: list[HostSequence], num_seqs: int, dtype: torch.dtype, device: torch.device
) -> Gather:
    group = sorted(group, key=lambda item: item.row)
    longest = max(item.num_keys for item in group)
    slots = np.empty((len(group), longest), dtype=np.int64)
    for line, item in zip(slots, group, strict=True):
        cursor = 0
        for slot, length in item.runs:
            line[cursor : cursor + length] = np.arange(slot, slot + length)
            cursor += length
        line[cursor:] = item.runs[0].slot
    mask = None
    if any(item.num_keys < longest for item in group):
        lengths = np.array([item.num_keys for item in group])
        unused = np.arange(longest)[None] >= lengths[:, None]
        bias = np.where(unused, np.float32("-inf"), np.float32(0))
        mask = torch.from_numpy(bias).to(device, dtype)[:, None, None]
    rows = None
    if len(group) < num_seqs:
        rows = torch.tensor([item.row for item in group], device=device)
    return Gather(rows, torch.from_numpy(slots.reshape(-1)).to(device), mask, len(group))


def _merge_runs(q: Tensor, kv: Tensor, views: tuple[RunView, ...], scale: float) -> Tensor:
    """Compute attention of q [1, K, G, D] over each run in place, and merge the results by log-sum-exp.

    Source: Dao et al., Flash-Decoding, 2023: partial results weighted by softmax of their lse.
    """
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for view in views:
        keys, values = view.read(kv)
        out, lse = cpu_attention_with_lse(q, keys, values, scale)
        outs.append(out)
        lses.append(lse)
    weights = torch.stack(lses).softmax(0)
    return (torch.stack(outs).float() * weights[..., None]).sum(0)
