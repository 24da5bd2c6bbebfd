"""Input and output of one step: flat arrays for a forward pass, and its logits and tokens.

Tokens are packed, decode rows first, then the prompt chunks one after the other:

    row     0 .. rows-1             rows ..                     rows+prompt_tokens-1
            one token per sequence  chunk of p0 | chunk of p1 | ...
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from kernels import PagedBatch
from model.device.transfer import StagedArrays

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from model.device.transfer import HostArray

A = TypeVar("A")


class Bucket(NamedTuple):
    """The sizes of a step's arrays; a smaller step leaves the rest unused.

    Attributes:
        rows: R, number of sequences with one token each.
        prompt_tokens: P, number of tokens of all other sequences.
        prompt_seqs: Q, number of those sequences.
        columns: C, blocks of the longest sequence.
        num_logits: M, rows of logits.
        shared_blocks: leading blocks that all decode rows' sequences share; attention reads them once for all rows.
            0 if `deterministic`.
        deterministic: whether a token's results must have the same bits in every step that could compute it: with any
            other tokens, as part of any chunk, and in any bucket with this field.
    """

    rows: int
    prompt_tokens: int
    prompt_seqs: int
    columns: int
    num_logits: int
    shared_blocks: int = 0
    deterministic: bool = False


class StepArrays(NamedTuple, Generic[A]):
    """The arrays of a step: NumPy arrays on the host, tensors on the device.

    Attributes:
        token_ids: [R + P] int64; -1 - i stands for the token at index i of the sampled tokens.
        positions: [R + P] int64, position of each token in its sequence.
        slot_mapping: [R + P] int32, cache slot for each token's keys and values; -1 writes nothing.
        logits_rows: [M] int64, the rows for which logits are computed; not read if Q = 0 and M = R: all rows have them.
        sampled_rows: [M] int64, index in the sampled tokens at which each row's token is stored; may repeat.
        cu_seqlens: [R + 1] int32, for the decode rows: 0, 1, ..., R.
        seq_lens: [R] int32, for the decode rows; 0 for an unused row.
        block_table: [R, C] int32, for the decode rows.
        prompt_cu_seqlens: [Q + 1] int32.
        prompt_seq_lens: [Q] int32.
        prompt_block_table: [Q, C] int32.
    """

    token_ids: A
    positions: A
    slot_mapping: A
    logits_rows: A
    sampled_rows: A
    cu_seqlens: A
    seq_lens: A
    block_table: A
    prompt_cu_seqlens: A
    prompt_seq_lens: A
    prompt_block_table: A


def _array_kinds(bucket: Bucket) -> list[tuple[tuple[int, ...], type[np.generic]]]:
    """Return shape and dtype of each array of a step, in the order of `StepArrays`."""
    rows, prompt_tokens, seqs, columns, num_logits, *_ = bucket
    tokens = rows + prompt_tokens
    return [
        ((tokens,), np.int64),
        ((tokens,), np.int64),
        ((tokens,), np.int32),
        ((num_logits,), np.int64),
        ((num_logits,), np.int64),
        ((rows + 1,), np.int32),
        ((rows,), np.int32),
        ((rows, columns), np.int32),
        ((seqs + 1,), np.int32),
        ((seqs,), np.int32),
        ((seqs, columns), np.int32),
    ]


def input_bytes(bucket: Bucket) -> int:
    """Return the bytes of a step's arrays."""
    return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in _array_kinds(bucket))


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
        rows, prompt_tokens, seqs, columns, *_ = bucket
        self.bucket, self.block_size = bucket, block_size
        self._staged = StagedArrays(_array_kinds(bucket), device)
        self.host: StepArrays[HostArray] = StepArrays(*self._staged.host)
        self.device: StepArrays[Tensor] = StepArrays(*self._staged.device)
        self.host.cu_seqlens[:] = np.arange(rows + 1)
        self.host.slot_mapping.fill(-1)
        self.decode = self.prefill = None
        most_keys = columns * block_size
        if rows:
            self.decode = PagedBatch(
                self.device.cu_seqlens,
                self.device.seq_lens,
                self.device.block_table,
                num_tokens=rows,
                max_seqlen_q=1,
                max_seqlen_k=most_keys,
                shared_prefix=bucket.shared_blocks * block_size,
                keys_settled=True,
            )
        if seqs:
            self.prefill = PagedBatch(
                self.device.prompt_cu_seqlens,
                self.device.prompt_seq_lens,
                self.device.prompt_block_table,
                num_tokens=prompt_tokens,
                max_seqlen_q=prompt_tokens,
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


class StepOutput(NamedTuple):
    """The results of a step, on the device.

    Attributes:
        logits: [M, V], a row for each of `StepArrays.logits_rows`.
        tokens: [M] int64, the argmax of each row, the smallest id among equals; -1 where the largest logit is not
            finite. `tokens` and `logprobs` are None if they were not requested.
        logprobs: [M] float32, natural log-probabilities of `tokens`; undefined where the token is -1.
    """

    logits: Tensor
    tokens: Tensor | None = None
    logprobs: Tensor | None = None

    def first(self, num_rows: int) -> StepOutput:
        """Return the leading rows."""
        return StepOutput(*(None if part is None else part[:num_rows] for part in self))  # type: ignore[arg-type]
