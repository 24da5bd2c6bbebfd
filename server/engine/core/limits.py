"""The limits of a step, shared by the scheduler, the recordings and the warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_FEW_SEQUENCES: Final = 8
"""Sequences up to which all of a step may have drafts of any length; more share as many rows of logits, or one each."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one sequence.

    Attributes:
        max_num_seqs: sequences computed in one step, at least 1.
        max_num_batched_tokens: tokens computed in one step, at least `max_num_seqs`.
        max_model_len: tokens of one sequence, prompt and output, at least 2.
        max_prefill_tokens: tokens computed in a step in which no sequence decodes, at least
            `max_num_batched_tokens`, which None stands for.
        max_queries: tokens of a decode row, its draft included, at least 1.
        exact_rows: a power of two; a step of up to so many rows, each a token of a sequence, computes a row with the
            same bits whatever the others are, also where they are tokens of the same sequence. 1 if only steps of one
            row do.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_prefill_tokens: int | None = None
    max_queries: int = 1
    exact_rows: int = 1

    @property
    def max_logits(self) -> int:
        """Rows of logits of a step: a token of each sequence, or more with drafts while few sequences run.

        Steps of few rows are computed as ones of up to `exact_rows`, with or without drafts.
        """
        few = min(self.max_num_seqs, _FEW_SEQUENCES)
        most = min(few * self.max_queries, self.max_num_batched_tokens)
        return max(self.max_num_seqs, most, self.exact_rows)

    @property
    def prefill_budget(self) -> int:
        """Tokens computed in a step in which no sequence decodes: the most of any step."""
        return self.max_prefill_tokens or self.max_num_batched_tokens

    def __post_init__(self) -> None:
        """Check that every running sequence can get at least one token per step.

        Raises:
            ValueError: a limit is below its minimum.
        """
        for name, value, least in (
            ("max_num_seqs", self.max_num_seqs, 1),
            ("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs),
            ("max_model_len", self.max_model_len, 2),
            ("max_prefill_tokens", self.prefill_budget, self.max_num_batched_tokens),
            ("max_queries", self.max_queries, 1),
            ("exact_rows", self.exact_rows, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; at least {least} is needed")
