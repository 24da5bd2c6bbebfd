"""Decode attention over the paged cache in PyTorch: the CPU's kernel, any GPU's fallback.

Knows runs of slots, not blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from kernels.attention.paged_host import host_sequences
from kernels.attention.torch_common import run_slots

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.plan import AttentionProblem, LaunchConfig, PagedBatch


class TorchDecode:
    """One step's decode attention; shapes as in the door's `decode_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch, launch: LaunchConfig | None
    ) -> None:
        del launch
        self._problem = problem
        self._sequences = host_sequences(problem, batch)
        self._num_seqs = batch.seq_lens.shape[0]

    def __call__(self, q: Tensor, kv: Tensor, out: Tensor) -> None:
        """Write the attention of `q` over `kv` to `out`."""
        problem = self._problem
        heads = (problem.num_kv_heads, 1, problem.group_size, problem.head_dim)
        if len(self._sequences) < self._num_seqs:
            out.zero_()
        for sequence in self._sequences:
            keys, values = run_slots(kv, sequence.runs)
            query = q[sequence.row].view(heads)
            keys, values = keys.transpose(0, 1)[:, None], values.transpose(0, 1)[:, None]
            if problem.softcap is None:
                result = functional.scaled_dot_product_attention(
                    query, keys, values, scale=problem.softmax_scale
                )
            else:
                scores = query.float() @ keys.float().transpose(-1, -2) * problem.softmax_scale
                scores = problem.softcap * torch.tanh(scores / problem.softcap)
                result = scores.softmax(-1) @ values.float()
            out[sequence.row].view(heads).copy_(result)
