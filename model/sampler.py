"""Chooses the tokens of a step from its logits, each row by its own rules.

Invariant: a row's token, and its log-probabilities, are a function of that row's logits and `SamplingRow`
alone, bit for bit; the other rows, their number and their order cannot change them. Knows no sequences and
no text.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from model import device_sampling
from model.host_sampling import HostSampler
from model.logprobs import prompt_logprobs
from model.sampling import SampledToken, SamplingRow, TokenHistory

__all__ = ["SampledToken", "Sampler", "SamplingRow", "TokenHistory", "prompt_logprobs"]


class Sampler:
    """Turns logits into tokens. Keeps scratch memory between calls and nothing else; for one thread at a time."""

    def __init__(self) -> None:
        self._host = HostSampler()

    def forward(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Choose one token for each row.

        Args:
            logits: [M, V], float32, bfloat16 or float16. Not changed.
            rows: M rows.

        Returns:
            M tokens in the order of the rows. A row with a NaN or a positive infinity among its logits, or with
            nothing left to draw from, has `error` set; the others are what they would be without it.
        """
        assert len(rows) == len(logits), (logits.shape, len(rows))
        if not rows:
            return []
        logits = logits.detach().float().contiguous()
        if logits.device.type == "cpu":
            return self._host.sample(logits, rows)
        return device_sampling.sample(logits, rows)
