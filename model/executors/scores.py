"""Scores of the tokens of prompts: log-probabilities of the tokens that follow, computed in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from model.executors.step import PromptScores
from model.sampling.logprobs import prompt_logprobs, prompt_top_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from model.executors.step import StepInput

_ROWS: Final = 256
"""Rows of logits computed at a time; bounds the memory with large vocabularies."""


def prompt_scores(
    step: StepInput, hidden: Tensor, head: Callable[[Tensor], Tensor]
) -> PromptScores:
    """Score the tokens of a step that have a next token.

    Args:
        step: of a bucket that wants scores.
        hidden: [T, C], of its tokens.
        head: computes logits [n, V] of rows [n, C].
    """
    rows = (step.host.next_ids >= 0).nonzero()[0]
    ids = step.host.next_ids[rows]
    scores = PromptScores([], [])
    for first in range(0, len(rows), _ROWS):
        piece = torch.as_tensor(rows[first : first + _ROWS], device=hidden.device)
        logits = head(hidden[piece])
        scores.logprobs.extend(prompt_logprobs(logits, ids[first : first + _ROWS].tolist()))
        if step.bucket.top:
            scores.top_tokens.extend(prompt_top_tokens(logits, step.bucket.top))
    return scores
