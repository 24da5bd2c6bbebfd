"""Logits and sampling rows of every kind, for tests."""

from __future__ import annotations

from typing import Any

import torch

from model.sampling.parameters import SamplingParams
from model.sampling.rows import SamplingRow, TokenHistory

VOCAB = 101  # odd, so that rows of a batch are aligned differently


def logits_of(seed: int, rows: int, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sampling_row(position: int = 0, prompt_ids=(), output_ids=(), banned=(), **parameters):
    """A row with the given parameters; `banned` ids cannot be sampled."""
    if banned:
        parameters |= {"stop_token_ids": tuple(banned), "min_new_tokens": 10**9}
    history = TokenHistory([*prompt_ids, *output_ids], len(prompt_ids))
    return SamplingRow(SamplingParams(max_new_tokens=10**9, **parameters), position, history)


def kinds_of_rows(vocab: int = VOCAB) -> list[dict[str, Any]]:
    return [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.6},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.5, "prompt_ids": range(0, vocab, 3)},
        {"frequency_penalty": 0.7, "presence_penalty": -0.4, "output_ids": [1, 1, 5, 9] * 3},
        {"temperature": 0.0, "banned": (3, 4)},
        {"top_p": 0.7, "logprobs": True, "top_logprobs": 4},
        {"banned": (0, 31, 32, 64, vocab - 1)},
        {"top_k": 9, "top_p": 0.9, "banned": range(0, vocab, 2)},
        {"typical_p": 0.8, "repetition_penalty": 1.2, "banned": (5,), "prompt_ids": (5, 6)},
        {"top_k": 9, "logit_bias": {2: 100.0, 5: 98.5, vocab - 1: -100.0, 10**6: 1.0}},
        {"bad_words": ((3,), (1, 2, 7), (2, 9)), "output_ids": [1, 2]},
    ]


NUM_KINDS = len(kinds_of_rows())


def varied_rows(count: int, vocab: int = VOCAB) -> list[SamplingRow]:
    kinds = kinds_of_rows(vocab)
    return [sampling_row(seed=i, position=10 + i, **kinds[i % NUM_KINDS]) for i in range(count)]


def oracle(scores: torch.Tensor, filters: dict[str, float], seen: list[int] | None = None):
    """Apply transformers' logits processors in the order of its `generate`."""
    from transformers import generation as hf

    ids = torch.tensor([seen or []], dtype=torch.int64)
    makers = {
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
        "typical_p": hf.TypicalLogitsWarper,
    }
    for name, make in makers.items():
        if name in filters:
            scores = make(filters[name])(ids, scores)
    return scores
