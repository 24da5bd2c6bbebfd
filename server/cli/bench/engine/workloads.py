"""The workloads of `tessera bench engine` and their names, such as `decode256` and `ttft4096`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from server.cli.bench.workload import Lengths

KINDS: dict[str, tuple[int, ...]] = {
    "batch": (1,),
    "ttft": (128, 4096),
    "decode": (8, 32, 128, 256),
    "mixed": (256,),
    "streams": (1, 64, 256),
    "hit": (32768, 131072),
    "context": (32768, 131072),
}
"""Kinds of workloads, with the sizes that a name without a number stands for."""
USUAL = ("batch", "ttft", "decode", "mixed")
"""Kinds that are measured by default."""
LONG_CONTEXT = ("ttft32768", "hit32768", "context32768", "ttft131072", "hit131072", "context131072")
"""Names of the workloads of `--long-context`."""

_NAME = re.compile(rf"({'|'.join(KINDS)})([1-9][0-9]*)?")
_OF_ONE_SEQUENCE = ("ttft", "hit", "context")
_SMALLEST_BUDGET = 512
STREAM_TOKENS = 256
"""Tokens of a prompt of "streams", and of its output."""


class Workload(NamedTuple):
    """One measurement.

    Attributes:
        kind: a key of `KINDS`.
        size: concurrent sequences; for "ttft", "hit" and "context", which have one, tokens of its prompt.
    """

    kind: str
    size: int

    @property
    def sequences(self) -> int:
        """Number of concurrent sequences."""
        return 1 if self.kind in _OF_ONE_SEQUENCE else self.size


def parse(name: str) -> list[Workload]:
    """Parse a workload's name: `decode256`, or `decode` for all usual sizes.

    Raises:
        ValueError: there is no workload of that name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"{name!r} is none of {', '.join(KINDS)}, with or without a number after it"
        )
    kind, size = match.groups()
    return [Workload(kind, n) for n in ([int(size)] if size else KINDS[kind])]


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements of a run.

    Attributes:
        workloads: in the order of measurement.
        prompt: tokens of the prompts of "batch" and "decode".
        steps: decode steps of "batch", "decode" and "context".
        lengths: tokens of prompts and outputs of "mixed".
    """

    workloads: tuple[Workload, ...]
    prompt: int
    steps: int
    lengths: Lengths

    @property
    def repeats_prompts(self) -> bool:
        """Whether a workload needs the prefix cache."""
        return any(kind in ("hit", "context") for kind, _ in self.workloads)

    @property
    def most_sequences(self) -> int:
        """Largest number of concurrent sequences."""
        return max(workload.sequences for workload in self.workloads)

    def outputs(self, sequences: int, budget: int) -> int:
        """Return the tokens that each sequence generates, so that the first does not end before the last begins.

        Args:
            sequences: number of concurrent sequences.
            budget: tokens of a step, which the prompts share.
        """
        return self.steps + 2 * (sequences * self.prompt // budget)

    def most_tokens(self, budget: int | None) -> int:
        """Return the tokens of the longest sequence, prompt and output together.

        Args:
            budget: tokens of a step; None where the engine chooses it.
        """
        tokens = 1
        for kind, size in self.workloads:
            if kind in ("ttft", "hit"):
                tokens = max(tokens, size + 1)
            elif kind == "context":
                tokens = max(tokens, size + self.steps + 1)
            elif kind == "mixed":
                tokens = max(tokens, 2 * self.lengths.longest)
            elif kind == "streams":
                tokens = max(tokens, 2 * STREAM_TOKENS)
            else:
                tokens = max(tokens, self.prompt + self.outputs(size, budget or _SMALLEST_BUDGET))
        return tokens
