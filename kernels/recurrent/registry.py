"""The registry of recurrent mixers, most preferred row first."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kernels.arch import TENSOR_CORES
from kernels.recurrent import cpu_library
from kernels.recurrent.problem import (
    GatedDeltaShape,
    Mamba2Shape,
    RecurrentProblem,
    ShortConvShape,
)
from kernels.selection import Choice, choose, reasons

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
        by_token: whether it computes the tokens of a prompt one after the other, so that a state has the same bits
            wherever a prompt is divided, not only at multiples of CHUNK, and whether it is a prompt's or generated.
        batch_invariant: whether the bits of a token depend on no other sequence of the step.
        several_queries: whether decode rows may have drafts, see `Segments.by_token`. A row with `by_token` computes
            them as prompts.
        divided_norm: "module:Class" of the norm of a group of Mamba-2 that ranks divide.
    """

    name: str
    targets: dict[type, str]
    limits: Callable[[RecurrentProblem, GPUArch], tuple[str, ...]] = lambda *_: ()
    note: str = ""
    keeps: bool = False
    by_token: bool = False
    batch_invariant: bool = False
    several_queries: bool = False
    divided_norm: str = "kernels.recurrent.pytorch.divided_norm:DividedNorm"

    def unsupported(self, problem: RecurrentProblem, arch: GPUArch) -> tuple[str, ...]:
        """List why it cannot compute a problem on a processor; empty if it can."""
        if type(problem.shape) not in self.targets:
            return (f"no {type(problem.shape).__name__.removesuffix('Shape')}",)
        return self.limits(problem, arch)


_DTYPES: Final = ("bfloat16", "float16", "float32")
_MOST_TAPS: Final = 8
_MOST_STATE: Final = 256
"""Columns of the state of a head of Mamba-2, which a program keeps in registers."""
_MOST_FLOAT32_STATE: Final = 128
_MOST_HEAD: Final = 256
"""Elements of a head of keys or values of the gated delta rule, of which a program keeps 64 tokens."""
_MOST_FLOAT32_HEAD: Final = 128


def _triton_limits(problem: RecurrentProblem, arch: GPUArch) -> tuple[str, ...]:
    """List why the kernels in Triton cannot compute a problem."""
    shape, dtype = problem.shape, problem.dtype
    return arch.unsupported(TENSOR_CORES) + reasons(
        (problem.trainable, "not differentiable"),
        (dtype not in _DTYPES, f"no {dtype}"),
        (
            not 1 < shape.width <= _MOST_TAPS,
            f"convolutions of 2 to {_MOST_TAPS} tokens, not {shape.width}",
        ),
        *_state_limits(problem),
    )


def _state_limits(problem: RecurrentProblem) -> tuple[tuple[bool, str], ...]:
    if isinstance(problem.shape, GatedDeltaShape):
        size = max(problem.shape.key_dim, problem.shape.value_dim)
        most = _MOST_FLOAT32_HEAD if problem.dtype == "float32" else _MOST_HEAD
        return ((size > most, f"heads of up to {most} elements in {problem.dtype}, not {size}"),)
    if not isinstance(problem.shape, Mamba2Shape):
        return ()
    size = problem.shape.state_dim
    most = _MOST_FLOAT32_STATE if problem.dtype == "float32" else _MOST_STATE
    return ((size > most, f"states of up to {most} columns a head in {problem.dtype}, not {size}"),)


_EQUAL_BITS: Final = "equal bits for a token beside any others, so deterministic steps take it too"

TRITON: Final = RecurrentSpec(
    "triton_recurrent",
    {
        ShortConvShape: "kernels.recurrent.gpu.short_conv:ShortConv",
        Mamba2Shape: "kernels.recurrent.gpu.mamba2:Mamba2",
    },
    _triton_limits,
    _EQUAL_BITS,
    keeps=True,
    batch_invariant=True,
    several_queries=True,
    divided_norm="kernels.recurrent.gpu.divided_norm:DividedNorm",
)
"""One or two launches for decode rows, a few for prompts. Tiles and the order of all sums depend on the shape alone."""

TRITON_GATED_DELTA: Final = RecurrentSpec(
    "triton_gated_delta",
    {GatedDeltaShape: "kernels.recurrent.gpu.gated_delta:GatedDelta"},
    _triton_limits,
    _EQUAL_BITS,
    keeps=True,
    batch_invariant=True,
    several_queries=True,
)
"""One launch for decode rows, three for those with drafts and three for prompts, as `TRITON`."""

CPU_LIBRARY: Final = RecurrentSpec(
    "cpu_recurrent",
    {
        ShortConvShape: "kernels.recurrent.cpu_library:ShortConv",
        GatedDeltaShape: "kernels.recurrent.cpu_library:GatedDelta",
        Mamba2Shape: "kernels.recurrent.cpu_library:Mamba2",
    },
    cpu_library.unsupported,
    keeps=True,
    by_token=True,
    batch_invariant=True,
    several_queries=True,
)
"""One call of the C library on a CPU, token by token."""

PYTORCH: Final = RecurrentSpec(
    "torch_recurrent",
    {
        ShortConvShape: "kernels.recurrent.pytorch.short_conv:ShortConv",
        GatedDeltaShape: "kernels.recurrent.pytorch.gated_delta:GatedDelta",
        Mamba2Shape: "kernels.recurrent.pytorch.mamba2:Mamba2",
    },
    keeps=True,
)
"""Separate operations, on every device. On a GPU, PyTorch may add up a row in another order beside more rows."""

REGISTRY: Final = (TRITON, TRITON_GATED_DELTA, CPU_LIBRARY, PYTORCH)


@functools.cache
def select(problem: RecurrentProblem, arch: GPUArch) -> Choice[RecurrentSpec]:
    """Choose the row for a problem; raises as `kernels.selection.choose`."""
    return choose(REGISTRY, lambda row: row.unsupported(problem, arch), problem, arch)
