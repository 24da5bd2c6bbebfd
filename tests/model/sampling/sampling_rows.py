"""Logits and sampling rows of every kind, for tests."""

from __future__ import annotations

import torch

from model.sampling.sampler import SamplingRow

VOCAB = 101  # odd, so that rows of a batch are aligned differently


def logits_of(seed: int, rows: int, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def varied_rows(count: int, vocab: int = VOCAB) -> list[SamplingRow]:
    kinds = [
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
    ]
    return [SamplingRow(seed=i, position=10 + i, **kinds[i % len(kinds)]) for i in range(count)]
