"""Counts of sequences that wait, by the length of their prompts, from which waits are estimated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from server.engine.core.sequence import Sequence

MAX_LENGTH_CLASSES: Final = 40
"""Length classes; more than any context needs."""


def length_class(num_tokens: int) -> int:
    """Return the class of a prompt of this length: class c has the lengths from 2 ** (c - 1) to 2 ** c - 1."""
    return num_tokens.bit_length()


class LengthCounts(NamedTuple):
    """Sums over sequences that wait, each by `length_class`.

    Attributes:
        sequences: their number.
        tokens: of their prompts.
        output: tokens that they will probably generate.
    """

    sequences: list[int]
    tokens: list[int]
    output: list[int]

    @classmethod
    def zeros(cls) -> LengthCounts:
        """Return those of no sequence."""
        return cls(*([0] * MAX_LENGTH_CLASSES for _ in cls._fields))

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> LengthCounts:
        """Return those of some sequences."""
        counts = cls.zeros()
        for sequence in sequences:
            counts.add(sequence)
        return counts

    def add(self, sequence: Sequence, sign: int = 1) -> None:
        """Count a sequence, or no more with the sign -1."""
        at = length_class(sequence.num_prompt_tokens)
        self.sequences[at] += sign
        self.tokens[at] += sign * sequence.num_prompt_tokens
        self.output[at] += sign * sequence.expected_output

    def plus(self, other: LengthCounts) -> LengthCounts:
        """Return the sums of both."""
        return LengthCounts(
            *([a + b for a, b in zip(*both, strict=True)] for both in zip(self, other, strict=True))
        )
