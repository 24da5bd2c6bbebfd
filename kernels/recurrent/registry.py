"""The registry of recurrent mixers, most preferred row first."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kernels.recurrent.problem import (
    GatedDeltaShape,
    Mamba2Shape,
    RecurrentProblem,
    ShortConvShape,
)
from kernels.selection import Choice, choose

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.arch import GPUArch


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """One way to compute a recurrent mixer.

    Attributes:
        name: unique; shown in plans.
        targets: "module:Class" of a `RecurrentKernel` by the type of the shape.
        limits: returns the reasons why it cannot compute a problem on a processor, apart from `targets`.
        note: a remark about this row, shown in plans.
        keeps: whether it writes states within prompts, see `Segments.kept_slots`. Where a kernel does not, a step ends
            where a state is kept.
    """

    name: str
    targets: dict[type, str]
    limits: Callable[[RecurrentProblem, GPUArch], tuple[str, ...]] = lambda *_: ()
    note: str = ""
    keeps: bool = False

    def unsupported(self, problem: RecurrentProblem, arch: GPUArch) -> tuple[str, ...]:
        """List why it cannot compute a problem on a processor; empty if it can."""
        if type(problem.shape) not in self.targets:
            return (f"no {type(problem.shape).__name__.removesuffix('Shape')}",)
        return self.limits(problem, arch)


PYTORCH: Final = RecurrentSpec(
    "torch_recurrent",
    {
        ShortConvShape: "kernels.recurrent.pytorch.short_conv:ShortConv",
        GatedDeltaShape: "kernels.recurrent.pytorch.gated_delta:GatedDelta",
        Mamba2Shape: "kernels.recurrent.pytorch.mamba2:Mamba2",
    },
    keeps=True,
)
"""Separate operations, on every device."""

REGISTRY: Final = (PYTORCH,)


@functools.cache
def select(problem: RecurrentProblem, arch: GPUArch) -> Choice[RecurrentSpec]:
    """Choose the row for a problem; raises as `kernels.selection.choose`."""
    return choose(REGISTRY, lambda row: row.unsupported(problem, arch), problem, arch)
