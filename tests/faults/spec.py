"""The faults to inject, and how they are written as text."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

KINDS: Final = (
    "raise", "oom", "fatal", "nan", "hang", "slow", "exit", "segfault",
)  # fmt: skip
"""What a fault does: raise an error, run out of memory, break the device, make a row's logits NaN, never return, take
longer, end the process, end it by SIGSEGV.
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        kind: one of `KINDS`.
        step: the first step that it applies to. Steps that compute something count from 1; a step that is computed
            again keeps its number.
        row: index of a sequence in the batch of that step, decode rows first. The fault then belongs to this sequence:
            it happens in every step with the sequence, also when the step is computed again. None for the whole step.
        times: number of launches at which a fault without a row happens; 0 for all from the first on.
        every: the fault happens again after so many steps, with `row` to another sequence; 0 for never.
        seconds: duration of `slow`.
    """

    kind: str
    step: int = 1
    row: int | None = None
    times: int = 1
    every: int = 0
    seconds: float = 1.0

    def is_due(self, step: int) -> bool:
        """Return whether the fault begins at a step."""
        if step < self.step:
            return False
        return step == self.step or bool(self.every and (step - self.step) % self.every == 0)


def parse(text: str) -> list[Fault]:
    """Return the faults of a text such as `raise@step=5:row=2, slow@step=9:seconds=0.5`.

    Raises:
        ValueError: the text names an unknown fault or option, or a value is not a number.
    """
    return [_parse(part.strip()) for part in text.split(",") if part.strip()]


def _parse(text: str) -> Fault:
    kind, _, rest = text.partition("@")
    if kind not in KINDS:
        raise ValueError(f"fault {kind!r} of {text!r} is none of {', '.join(KINDS)}")
    names = {field.name for field in fields(Fault)} - {"kind"}
    options: dict[str, float] = {}
    for option in filter(None, rest.split(":")):
        name, _, value = option.partition("=")
        if name not in names:
            raise ValueError(f"option {name!r} of {text!r} is none of {', '.join(sorted(names))}")
        options[name] = float(value) if name == "seconds" else int(value)
    return Fault(kind=kind, **options)
