"""Chooses the tokens of a step from its logits, each row by its own rules.

Invariant: a row's token, and its log-probabilities, are a function of that row's logits and `SamplingRow`
alone, bit for bit; the other rows, their number and their order cannot change them. Knows no sequences and
no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from model.sampling.device import DeviceDraw
from model.sampling.host import HostSampler
from model.sampling.logprobs import prompt_logprobs
from model.sampling.parameters import SampledToken, SamplingRow, TokenHistory

__all__ = ["Draw", "SampledToken", "Sampler", "SamplingRow", "TokenHistory", "prompt_logprobs"]


class Draw(Protocol):
    """The tokens of some rows, not waited for."""

    @property
    def tokens(self) -> Tensor:
        """[M] int64 on the device of the logits, valid ids."""

    @property
    def feeds_next(self) -> bool:
        """Whether the next tokens can be drawn behind `tokens` before the host has seen them."""

    def result(self) -> list[SampledToken]:
        """Wait for them; M tokens in the order of the rows."""


class HostDraw:
    """Tokens that are there already.

    Attributes:
        feeds_next: whether no row has penalties, which count tokens on the host.
    """

    def __init__(self, sampled: list[SampledToken], rows: Sequence[SamplingRow]) -> None:
        self._sampled = sampled
        self.feeds_next = not any(row.has_penalties for row in rows)

    @property
    def tokens(self) -> Tensor:
        """[M] int64; 0 for a row without a token."""
        return torch.tensor([token.token_id or 0 for token in self._sampled])

    def result(self) -> list[SampledToken]:
        """M tokens in the order of the rows."""
        return self._sampled


class Sampler:
    """Turns logits into tokens. Keeps scratch memory between calls and nothing else; for one thread at a time."""

    def __init__(self) -> None:
        self._host = HostSampler()

    def forward(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Choose one token for each row and wait for them.

        Args:
            logits: [M, V], float32, bfloat16 or float16. Not changed.
            rows: M rows.

        Returns:
            M tokens in the order of the rows. A row with a NaN or a positive infinity among its logits, or with
            nothing left to draw from, has `error` set; the others are what they would be without it.
        """
        return self.begin(logits, rows).result() if rows else []

    def begin(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Draw:
        """Choose one token for each row without waiting for the device.

        Args:
            logits: as for `forward`; must stay as they are until the result is there unless the draw `feeds_next`.
            rows: M >= 1 rows.
        """
        assert len(rows) == len(logits), (logits.shape, len(rows))
        logits = logits.detach()
        if logits.device.type == "cpu":
            return HostDraw(self._host.sample(logits.float().contiguous(), rows), rows)
        return DeviceDraw(logits.contiguous(), rows)
