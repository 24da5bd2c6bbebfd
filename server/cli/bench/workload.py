"""Random lengths and arrival times of requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator


@dataclass(frozen=True, slots=True)
class Lengths:
    """A uniform distribution of numbers of tokens, both ends included.

    Attributes:
        shortest: at least 1.
        longest: at least `shortest`.
    """

    shortest: int
    longest: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse `256` or `100-1024`.

        Raises:
            ValueError: the text is neither of them, has a length below 1, or begins with the longer length.
        """
        first, _, last = text.partition("-")
        try:
            shortest = int(first)
            longest = int(last) if last else shortest
        except ValueError:
            raise ValueError(
                f"{text!r} is neither a number of tokens nor a range such as 100-1024"
            ) from None
        if not 1 <= shortest <= longest:
            raise ValueError(f"{text!r}: lengths begin at 1, and the shorter one comes first")
        return cls(shortest, longest)

    def sample(self, count: int, generator: Generator) -> list[int]:
        """Return `count` random lengths."""
        lengths: list[int] = generator.integers(self.shortest, self.longest + 1, count).tolist()
        return lengths

    def __str__(self) -> str:
        """Format as `parse` reads it."""
        one = self.shortest == self.longest
        return str(self.shortest) if one else f"{self.shortest}-{self.longest}"


def arrivals(count: int, rate: float, burstiness: float, generator: Generator) -> list[float]:
    """Return random arrival times of requests.

    Args:
        count: requests.
        rate: requests per second, on average.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less than 1 is burstier,
            more than 1 more regular.
        generator: source of randomness.

    Returns:
        Seconds in ascending order; the first request arrives at 0.
    """
    gaps = generator.gamma(burstiness, 1.0 / (rate * burstiness), count - 1)
    times: list[float] = np.concatenate(([0.0], np.cumsum(gaps))).tolist()
    return times


def share(count: int, parts: int) -> list[int]:
    """Split a number into parts that differ by at most one, larger ones first."""
    whole, rest = divmod(count, parts)
    return [whole + (i < rest) for i in range(parts)]
