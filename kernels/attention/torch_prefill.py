"""Causal prefill attention over the paged cache in PyTorch: the CPU's kernel, any GPU's fallback.

Knows runs of slots, not blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from kernels.attention.paged_host import HostSequence, host_sequences
from kernels.attention.torch_common import run_slots

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.plan import AttentionProblem, LaunchConfig, PagedBatch


class TorchPrefill:
    """One step's prefill attention; shapes as in the door's `prefill_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch, launch: LaunchConfig | None
    ) -> None:
        del launch
        self._problem = problem
        self._sequences = host_sequences(problem, batch)
        device = batch.seq_lens.device
        self._masks = [self._mask(sequence, device) for sequence in self._sequences]

    def __call__(self, q: Tensor, kv: Tensor, out: Tensor) -> None:
        """Write the attention of `q` over `kv` to `out`."""
        problem = self._problem
        for sequence, mask in zip(self._sequences, self._masks, strict=True):
            heads = (
                sequence.num_queries,
                problem.num_kv_heads,
                problem.group_size,
                problem.head_dim,
            )
            rows = slice(sequence.row, sequence.row + sequence.num_queries)
            keys, values = run_slots(kv, sequence.runs)
            # A key-value head is the batch and its query heads the heads, so that the group shares
            # keys by a stride of 0 and nothing is repeated.
            keys = keys.transpose(0, 1)[:, None].expand(-1, problem.group_size, -1, -1)
            values = values.transpose(0, 1)[:, None].expand(-1, problem.group_size, -1, -1)
            query = q[rows].view(heads).permute(1, 2, 0, 3)
            if problem.softcap is None:
                result = functional.scaled_dot_product_attention(
                    query,
                    keys,
                    values,
                    attn_mask=mask,
                    is_causal=mask is None and sequence.num_queries > 1,
                    scale=problem.softmax_scale,
                )
            else:
                scores = query.float() @ keys.float().transpose(-1, -2) * problem.softmax_scale
                scores = problem.softcap * torch.tanh(scores / problem.softcap)
                scores = scores.masked_fill(~mask, float("-inf")) if mask is not None else scores
                result = scores.softmax(-1) @ values.float()
            out[rows].view(heads).copy_(result.permute(2, 0, 1, 3))

    def _mask(self, sequence: HostSequence, device: torch.device) -> Tensor | None:
        """Build the [num_queries, num_keys] bool mask, where SDPA's own causal mask does not do."""
        problem = self._problem
        window = problem.sliding_window
        if window is not None and window >= sequence.num_keys:
            window = None
        if problem.softcap is None and window is None and sequence.history == 0:
            return None
        if sequence.num_queries == 1:
            return None
        query = torch.arange(sequence.history, sequence.num_keys, device=device)[:, None]
        key = torch.arange(sequence.num_keys, device=device)[None, :]
        mask = key <= query
        return mask if window is None else mask & (key > query - window)
