"""What all registries of kernels share: the choice of a row and its reasons; and the rows of operations on vectors.

A registry is a tuple of rows, the most preferred first. Each row lists the reasons why it does not support a problem on
a processor; the first row without a reason is taken. Nothing here accesses a device, so the processor may be absent.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from kernels.arch import TENSOR_CORES, GPUArch
from kernels.errors import NoKernelError

_DTYPES: Final = ("bfloat16", "float16", "float32")


class Row(Protocol):
    """A row of a registry; it may have a `note` too, a remark that `choose` adds to its reason."""

    @property
    def name(self) -> str:
        """Unique in its registry; shown in plans and errors."""


R = TypeVar("R", bound=Row)


class Refusal(NamedTuple):
    """A row that does not support the problem, with all of its reasons."""

    kernel: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return one line for logs and error messages."""
        return f"{self.kernel}: {'; '.join(self.reasons)}"


class Choice(NamedTuple, Generic[R]):
    """The row chosen for a problem.

    Attributes:
        spec: the row.
        why: the reason for the choice, one sentence.
        refusals: the more preferred rows, with their reasons.
    """

    spec: R
    why: str
    refusals: tuple[Refusal, ...]


def choose(
    rows: Iterable[R], unsupported: Callable[[R], tuple[str, ...]], problem: object, arch: GPUArch
) -> Choice[R]:
    """Choose the first row without a reason against it.

    Args:
        rows: the most preferred first.
        unsupported: lists the reasons against a row; empty if there are none.
        problem: what the row is for; its text is part of `why` and of the error.
        arch: the processor, likewise.

    Raises:
        NoKernelError: there are reasons against every row; the message has them all.
    """
    refusals: list[Refusal] = []
    for spec in rows:
        reasons = unsupported(spec)
        if not reasons:
            why = f"{spec.name} is the first row that supports {problem} on {arch}"
            note = getattr(spec, "note", "")
            return Choice(spec, f"{why}; {note}" if note else why, tuple(refusals))
        refusals.append(Refusal(spec.name, reasons))
    listed = "; ".join(map(str, refusals)) or f"the registry has no row for {problem}"
    raise NoKernelError(f"no kernel for {problem} on {arch}: {listed}")


@functools.cache
def load(target: str) -> Any:  # noqa: ANN401 - each registry has targets of a type of its own
    """Import the target of a row, "module:attribute", when it is first used."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, slots=True)
class VectorProblem:
    """An operation on vectors: a norm, an activation, a rotation, the choice of a token from logits.

    Attributes:
        dtype: of the vectors.
        trainable: whether the result must be differentiable.
    """

    dtype: str
    trainable: bool = False

    def __str__(self) -> str:
        """Return one line for logs and error messages."""
        return f"{self.dtype}, differentiable" if self.trainable else self.dtype


def triton_unsupported(problem: VectorProblem, arch: GPUArch) -> tuple[str, ...]:
    """List why our Triton kernels between the products cannot compute a problem; empty if they can."""
    return arch.unsupported(TENSOR_CORES) + reasons(
        (problem.trainable, "not differentiable"),
        (problem.dtype not in _DTYPES, f"no {problem.dtype}"),
    )


def reasons(*tests: tuple[bool, str]) -> tuple[str, ...]:
    """Return the texts of the tests that fail, each a pair of whether it does and its text."""
    return tuple(reason for fails, reason in tests if fails)


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """One way to compute an operation on vectors.

    Attributes:
        name: unique; shown in plans.
        target: "module:attribute".
        unsupported: returns the reasons why it cannot compute a problem on a processor; empty if it can.
        note: a remark about this row, shown in plans.
    """

    name: str
    target: str
    unsupported: Callable[[VectorProblem, GPUArch], tuple[str, ...]] = lambda *_: ()
    note: str = ""


@functools.cache
def select_vector(
    registry: tuple[VectorSpec, ...], problem: VectorProblem, arch: GPUArch
) -> Choice[VectorSpec]:
    """Choose the row of a registry of operations on vectors; raises as `choose`."""
    return choose(registry, lambda row: row.unsupported(problem, arch), problem, arch)
