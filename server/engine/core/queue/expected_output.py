"""How many tokens a sequence will probably generate, by what others with such a limit have generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_FIRST: Final = 256.0
"""Tokens of an answer before any has ended."""
_CLASSES: Final = 24
"""Classes of limits: class c has those from 2 ** (c - 1) to 2 ** c - 1. More than any context needs."""
_NEWEST: Final = 0.05
"""Share of the newest sequence in a mean."""


def expected_output(limit: int, means: Sequence[float]) -> int:
    """Return the number of tokens that a sequence will probably generate, at least 1.

    Few clients set a limit that their answers reach; without one it is the rest of the context.

    Args:
        limit: most tokens, at least 1.
        means: as `OutputMeans.means`, or empty if nothing is known.
    """
    at = limit.bit_length()
    if not means:
        return min(limit, round(_FIRST))
    return min(limit, max(1, round(means[at] or means[0])))


class OutputMeans:
    """The mean numbers of tokens that sequences have generated, for each class of limits.

    Attributes:
        means: by class; 0.0 where none has ended. Class 0, which no limit has, is that of all sequences.
    """

    def __init__(self) -> None:
        self.means = [0.0] * _CLASSES
        self.means[0] = _FIRST

    def add(self, limit: int, num_tokens: int) -> None:
        """Count a sequence that has ended."""
        for at in (0, limit.bit_length()):
            mean = self.means[at] or max(1, num_tokens)  # not 0.0, which is unknown
            self.means[at] = mean + _NEWEST * (num_tokens - mean)
