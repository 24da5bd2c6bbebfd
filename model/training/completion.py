"""Completion of a batch of prompts over the paged KV cache, for evaluating the trained model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from kernels import PagedBatch
from model.decoder import DecoderLM
from model.device.kv_cache import KVCache
from model.sampling.host import HostSampler
from model.sampling.parameters import SamplingParams
from model.sampling.rows import SamplingRow, TokenHistory

BLOCK_SIZE = 16


@torch.no_grad()
def complete_prompts(
    model: DecoderLM, prompts: Sequence[Sequence[int]], sampling: SamplingParams, end_id: int
) -> list[list[int]]:
    """Continue each prompt.

    Args:
        model: in evaluation mode.
        prompts: token ids, none empty; every prompt and its completion fit the context.
        sampling: how tokens are chosen; the seed of each prompt is one higher than that of the one before.
        end_id: token that ends a completion; not part of the result.

    Returns:
        The new token ids of each prompt.
    """
    max_new_tokens = sampling.max_new_tokens
    choose = _Chooser(prompts, sampling)
    device, dtype = model.device, model.dtype
    lengths = [len(prompt) for prompt in prompts]
    blocks = -(-(max(lengths) + max_new_tokens) // BLOCK_SIZE)
    cache = KVCache(model.network.state(dtype), blocks * len(prompts), BLOCK_SIZE, device)
    table = torch.arange(blocks * len(prompts), dtype=torch.int32, device=device)
    table = table.view(len(prompts), blocks)
    ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    counts = torch.tensor(lengths, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    rows = torch.repeat_interleave(torch.arange(len(prompts), device=device), counts)
    seen = counts.clone()
    chosen: list[Tensor] = []
    for step in range(max_new_tokens):
        batch = PagedBatch(
            cu_seqlens_q=torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32),
            seq_lens=seen.to(torch.int32),
            block_table=table,
            num_tokens=sum(lengths) if step == 0 else len(lengths),
            max_seqlen_q=max(lengths) if step == 0 else 1,
            max_seqlen_k=max(lengths) + step,
        )
        slots = table[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        prefill, decode = (batch, None) if step == 0 else (None, batch)
        metadata = model.attention.metadata(slots.to(torch.int32), BLOCK_SIZE, decode, prefill)
        hidden = model.executors.layers.paged(ids, positions, cache, metadata)
        ids = choose(model.logits(hidden[counts.cumsum(0) - 1]))
        chosen.append(ids)
        positions, rows = seen, torch.arange(len(prompts), device=device)
        counts, seen = torch.ones_like(counts), seen + 1
        if step % BLOCK_SIZE == 0 and bool((torch.stack(chosen) == end_id).any(0).all()):
            break
    columns = torch.stack(chosen, 1).tolist()
    return [row[: row.index(end_id)] if end_id in row else row for row in columns]


class _Chooser:
    """Chooses a token for every prompt by the sampler of the service, or by one argmax where that is the same."""

    def __init__(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        self._sampler = HostSampler()
        self._is_argmax = sampling.argmax_from == 0
        self._tokens = [list(prompt) for prompt in prompts]
        self._rows = [
            (
                msgspec.structs.replace(sampling, seed=sampling.seed + number),
                TokenHistory(tokens, len(tokens)),
            )
            for number, tokens in enumerate(self._tokens)
        ]

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the next token of every prompt, int64 [N], for logits [N, V]."""
        if self._is_argmax:
            return logits.argmax(-1)
        rows = [
            SamplingRow(parameters, len(history.token_ids), history)
            for parameters, history in self._rows
        ]
        sampled = self._sampler.sample(logits.float().cpu().contiguous(), rows)
        chosen = []
        for tokens, it in zip(self._tokens, sampled, strict=True):
            assert it.token_id is not None, it.error
            tokens.append(it.token_id)
            chosen.append(it.token_id)
        return torch.tensor(chosen, device=logits.device)
