"""What `tessera bench engine` may measure, by name: `decode256`, `ttft4096`. Knows no engine."""

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
}
"""Kinds of workloads, and the sizes that are measured unless others are named."""

_NAME = re.compile(r"(batch|ttft|decode|mixed)([1-9][0-9]*)?")
_SMALLEST_BUDGET = 512


class Workload(NamedTuple):
    """One question.

    Attributes:
        kind: a key of `KINDS`.
        size: sequences at the same time; of "ttft", tokens of the prompt.
    """

    kind: str
    size: int

    @property
    def sequences(self) -> int:
        """That run at the same time."""
        return 1 if self.kind == "ttft" else self.size


def parse(name: str) -> list[Workload]:
    """Read a workload's name: `decode256`, or `decode` for all sizes that are usual.

    Raises:
        ValueError: there is none of that name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"{name!r} is none of {', '.join(KINDS)}, with a number behind it or without"
        )
    kind, size = match.groups()
    return [Workload(kind, n) for n in ([int(size)] if size else KINDS[kind])]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        workloads: in this order.
        prompt: tokens of the prompts of sequences that decode together.
        steps: in which they do.
        lengths: in tokens, of mixed prompts and of their outputs.
    """

    workloads: tuple[Workload, ...]
    prompt: int
    steps: int
    lengths: Lengths

    @property
    def most_sequences(self) -> int:
        """That run at the same time."""
        return max(workload.sequences for workload in self.workloads)

    def outputs(self, sequences: int, budget: int) -> int:
        """Tokens that each of them has to generate: the first ones must not end before the last ones begin.

        Args:
            sequences: that decode together.
            budget: tokens of a step, which prompts that come together share.
        """
        return self.steps + 2 * (sequences * self.prompt // budget)

    def most_tokens(self, budget: int | None) -> int:
        """Of the longest sequence, prompt and output together.

        Args:
            budget: tokens of a step; None where the engine chooses.
        """
        tokens = 1
        for kind, size in self.workloads:
            if kind == "ttft":
                tokens = max(tokens, size + 1)
            elif kind == "mixed":
                tokens = max(tokens, 2 * self.lengths.longest)
            else:
                tokens = max(tokens, self.prompt + self.outputs(size, budget or _SMALLEST_BUDGET))
        return tokens
