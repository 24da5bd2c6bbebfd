"""Input and output of one step: the arrays of its columns for a forward pass, and its logits and tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kernels import PagedBatch
from kernels.linear.lora import LoraRows
from kernels.selection import load
from model.device.transfer import StagedArrays
from model.executors.columns import StepArrays, columns_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from model.device.transfer import HostArray
    from model.executors.columns import Bucket


class StepInput:
    """The arrays of a step in one buffer, which is copied to the device in one transfer.

    It holds only numbers: another process with the same bucket and the same bytes computes the same step.

    Attributes:
        bucket: sizes of the arrays.
        block_size: S, tokens per cache block.
        host: the arrays to fill; write them only after `wait`. A new input contains no sequence.
        device: the target of `send`; on a CPU the same memory as `host`.

    Args:
        bucket: see above.
        block_size: see above.
        device: device that computes the step.
    """

    def __init__(self, bucket: Bucket, block_size: int, device: torch.device) -> None:
        self.bucket, self.block_size = bucket, block_size
        columns = columns_of(bucket)
        self._staged = StagedArrays([(it.size(bucket), it.dtype) for it in columns], device)
        names = [it.name for it in columns]
        self.host: StepArrays[HostArray] = StepArrays(zip(names, self._staged.host, strict=True))
        self.device: StepArrays[Tensor] = StepArrays(zip(names, self._staged.device, strict=True))
        for column, array in zip(columns, self._staged.host, strict=True):
            array.fill(column.fill)
        if bucket.queries == 1:
            self.host.cu_seqlens[:] = np.arange(bucket.rows + 1)
        self.decode = self.prefill = None
        most_keys = bucket.columns * block_size
        if bucket.rows:
            self.decode = PagedBatch(
                self.device.cu_seqlens,
                self.device.seq_lens,
                self.device.block_table,
                num_tokens=bucket.decode_tokens,
                max_seqlen_q=bucket.queries,
                max_seqlen_k=most_keys,
                shared_prefix=bucket.shared_blocks * block_size,
                keys_settled=not bucket.chained,
            )
        if bucket.prompt_seqs:
            self.prefill = PagedBatch(
                self.device.prompt_cu_seqlens,
                self.device.prompt_seq_lens,
                self.device.prompt_block_table,
                num_tokens=bucket.prompt_tokens,
                max_seqlen_q=bucket.prompt_tokens,
                max_seqlen_k=most_keys,
            )

    def wait(self) -> None:
        """Wait until the last copy is complete, so that the host arrays may be written."""
        self._staged.wait()

    def send(self) -> None:
        """Queue the copy to the device."""
        self._staged.send()

    def to_bytes(self) -> bytes:
        """Return the contents of the host arrays."""
        return self._staged.to_bytes()

    def load(self, data: bytes) -> None:
        """Fill the arrays with the contents of those of another input of the same bucket, and queue the copy."""
        self.wait()
        self._staged.load(data)
        self.send()


class PromptScores(NamedTuple):
    """The scores of the tokens of a step that have a `StepArrays.next_ids`, in their order, on the host.

    Attributes:
        logprobs: natural log-probabilities of the next tokens; NaN where the logits are not finite.
        top_tokens: (token id, log-probability) of `Bucket.top` tokens each, most likely first.
    """

    logprobs: list[float]
    top_tokens: list[list[tuple[int, float]]]


class StepOutput(NamedTuple):
    """The results of a step, on the device.

    Attributes:
        logits: [M, V], a row for each of `StepArrays.logits_rows`.
        tokens: [M] int64, the argmax of each row, the smallest id among equals; -1 where the largest logit is not
            finite. `tokens` and `logprobs` are None if they were not requested.
        logprobs: [M] float32, natural log-probabilities of `tokens`; undefined where the token is -1.
        scores: of prompt tokens, if `Bucket.want` requests them.
    """

    logits: Tensor
    tokens: Tensor | None = None
    logprobs: Tensor | None = None
    scores: PromptScores | None = None

    def first(self, num_rows: int) -> StepOutput:
        """Return the leading rows."""
        return StepOutput(
            self.logits[:num_rows],
            None if self.tokens is None else self.tokens[:num_rows],
            None if self.logprobs is None else self.logprobs[:num_rows],
        )


def token_slots(step: StepInput) -> Tensor:
    """Return the slot of each token's adapter, [T] int32 on the device, -1 for none."""
    return _of_tokens(step, step.device.adapter)


def wanted_rows(step: StepInput) -> PagedBatch:
    """Return a batch of the tokens whose logits are wanted, [M], each as the last one of another sequence."""
    bucket, arrays = step.bucket, step.device
    rows, device = arrays.logits_rows, arrays.logits_rows.device
    tables = torch.cat((arrays.block_table, arrays.prompt_block_table))
    lengths = torch.cat((arrays.seq_lens, arrays.prompt_seq_lens))
    sequences = _of_tokens(step, torch.arange(len(lengths), device=device))[rows]
    known = sequences.clamp_min(0)
    is_unused = (sequences < 0) | (lengths[known] == 0)
    seq_lens = (arrays.positions[rows] + 1).masked_fill(is_unused, 0)
    return PagedBatch(
        torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
        seq_lens.to(torch.int32),
        tables[known],
        num_tokens=len(rows),
        max_seqlen_q=1,
        max_seqlen_k=bucket.columns * step.block_size,
    )


def _of_tokens(step: StepInput, rows: Tensor) -> Tensor:
    """Return the value of each token's sequence, [T], from those of the sequences, [R + Q]; -1 for unused tokens."""
    bucket, arrays = step.bucket, step.device
    count = bucket.rows
    parts = []
    if bucket.queries == 1:
        parts.append(rows[:count])
    elif count:
        parts.append(_expanded(rows[:count], arrays.cu_seqlens, bucket.decode_tokens))
    if bucket.prompt_seqs:
        parts.append(_expanded(rows[count:], arrays.prompt_cu_seqlens, bucket.prompt_tokens))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _expanded(rows: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the value of each token's sequence; -1 for tokens after the last one."""
    tokens = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=rows.device)
    sequence = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    padded = torch.cat((rows, rows.new_full((1,), -1)))
    return padded[sequence]


def lora_rows(step: StepInput) -> LoraRows:
    """Return the adapters of a step's rows, for layers on its device."""
    slots = token_slots(step)
    if slots.device.type != "cpu":
        sort: Callable[[Tensor], LoraRows] = load("kernels.linear.gpu.lora:sorted_rows")
        return sort(slots)
    bucket, host = step.bucket, step.host
    bounds: list[tuple[int, int]] = []
    for starts, base in ((host.cu_seqlens, 0), (host.prompt_cu_seqlens, bucket.decode_tokens)):
        ends = [base + int(it) for it in starts]
        bounds += pairwise(ends)
    found = zip(bounds, host.adapter.tolist(), strict=True)
    return LoraRows(
        slots, sequences=[(*it, slot) for it, slot in found if slot >= 0 and it[0] < it[1]]
    )
