"""The shared memory of a program: the ring, whose rules are checked as it is used, and what lies beside it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from tests.kernels.step.schedule.events import require
from tests.kernels.step.schedule.values import NO_USES, Memory, Pointer, Value


class Shared:
    """Shared memory of a program, except the ring: it keeps from which uses of the ring its numbers were computed."""

    def __init__(self, dtype: Any, shape: list[int], of: Shared | None = None) -> None:
        self.dtype, self.shape = dtype, shape
        self.root = of.root if of else self
        self.view: tuple[Any, ...] = (str(dtype), *map(int, shape))
        if not of:
            self.kept: tuple[Any, dict[Any, frozenset[int]]] = (self.view, {})

    def index(self, i: Any) -> Shared:
        require(0 <= i < self.shape[0], f"shared memory of {self.shape[0]} has no {i}")
        found = Shared(self.dtype, self.shape[1:] or [1], self)
        found.view = (*self.view, int(i))
        return found

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        del layout
        found = Shared(dtype, shape, self)
        if self is not self.root:
            found.view = (*self.view, *found.view)
        return found

    def load(self, layout: Any) -> Value:
        del layout
        kept = self.root.kept[1]
        if self.view in kept:
            return Value(kept[self.view], self.dtype)
        return Value(NO_USES.union(*kept.values()), self.dtype)

    def store(self, value: Value) -> None:
        # A view of another shape is another use of the memory.
        kind = self.view[:-1]
        if self.root.kept[0] != kind:
            self.root.kept = (kind, {})
        self.root.kept[1][self.view] = value.uses


class Stage:
    """A view of a stage of the ring."""

    __slots__ = ("dtype", "number", "path", "ring")

    def __init__(self, ring: Ring, number: int, dtype: Any, path: tuple[int, ...] = ()) -> None:
        self.ring, self.number, self.dtype, self.path = ring, number, dtype, path

    def index(self, i: Any) -> Stage:
        return Stage(self.ring, self.number, self.dtype, (*self.path, int(i)))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Stage:
        del shape, layout
        return Stage(self.ring, self.number, dtype, self.path)

    def load(self, layout: Any) -> Value:
        del layout
        return Value(frozenset((self.ring.load(self.number),)), self.dtype)

    def store(self, value: Value) -> None:
        del value
        self.ring.store(self.number, self.path)


class StageMemory:
    """The stages of the ring, or of the scales beside them."""

    def __init__(self, ring: Ring, dtype: Any, shape: list[int]) -> None:
        self.ring, self.dtype, self.shape = ring, dtype, shape

    def index(self, i: Any) -> Stage:
        require(0 <= i < self.ring.stages, f"the ring has no stage {i}")
        return Stage(self.ring, int(i), self.dtype)


class MBarriers:
    """The barriers `full` or `empty` of the ring; each is named by what it is and by its stage."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def index(self, i: Any) -> tuple[MBarriers, int]:
        return self, int(i)


class Copy(NamedTuple):
    """A copy to a part of a stage; `mask` says which elements are copied, None if all."""

    part: tuple[int, ...]
    source: Pointer
    mask: Any


class RowsOfWeights(NamedTuple):
    """Which rows of a matrix a stage holds, from a first one on, and which of their columns."""

    rows: tuple[int, ...]
    begin: int
    end: int


@dataclasses.dataclass
class Use:
    """A use of a stage.

    Attributes:
        stage: its number.
        copies: of keys and values and of scales.
        weights: a matrix, the first row, and what is copied from there.
        stored: views of a stage of keys to which the step's keys are written.
        product: what is computed from it.
    """

    stage: int
    copies: list[Copy] = dataclasses.field(default_factory=list)
    weights: tuple[Memory, int, RowsOfWeights] | None = None
    stored: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    product: str = ""


class Ring:
    """The ring of a program: the producer runs first, then the consumers.

    One order suffices, because each role does the same in every order. Both use the stages in the order of their
    numbers, each by turns of one wait and one arrival (other waits for the same use are passed at once). So when the
    producer waits for use k of a stage, it has filled the stage k times, and the consumers have released it k times or
    once less: the phase tells which, and the stage is not overwritten before it is released. Likewise when consumers
    wait, the stage has been filled k times or k + 1 times. A wait of the consumers ends if all uses that are a ring
    earlier have been released before it; what the producer waits for depends on no other program.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.uses: list[Use] = []
        self.full, self.empty = MBarriers(), MBarriers()
        self.consuming = False
        self._filled: dict[int, int] = {}
        self._open: dict[int, int] = {}
        self._copied: set[int] = set()
        self._taken = [0] * stages
        self._last_load = [-1] * stages
        self._unreleased = 0
        self._released: set[int] = set()
        self.barriers = 0

    def wait(self, barrier: tuple[MBarriers, int], phase: Any) -> None:
        kind, stage = barrier
        if kind is self.empty:
            self._begin(stage, int(phase))
        else:
            self._take(stage, int(phase))

    def _begin(self, stage: int, phase: int) -> None:
        number = len(self.uses)
        require(not self.consuming, "consumers wait for an empty stage")
        require(stage not in self._open, f"stage {stage} is filled twice")
        require(stage == number % self.stages, f"use {number} fills stage {stage}")
        count = self._filled.get(stage, 0)
        require(phase == (count & 1) ^ 1, f"use {number} waits for another phase of stage {stage}")
        self._open[stage] = number
        self.uses.append(Use(stage))

    def copy(self, target: Stage, source: Pointer, mask: Any = None) -> None:
        require(target.number in self._open, f"stage {target.number} is filled while it is in use")
        self.uses[self._open[target.number]].copies.append(Copy(target.path, source, mask))
        self._copied.add(target.number)

    def copy_weights(self, stage: int, memory: Memory, first: int, found: RowsOfWeights) -> None:
        require(stage in self._open, f"stage {stage} is filled while it is in use")
        use = self.uses[self._open[stage]]
        require(use.weights is None, f"stage {stage} is filled twice")
        use.weights = memory, first, found
        self._copied.add(stage)

    def copies_arrive(self, barrier: tuple[MBarriers, int], increment_count: bool) -> None:
        kind, stage = barrier
        require(kind is self.full and not increment_count, "copies arrive at another barrier")
        require(stage in self._open, f"stage {stage} is full twice")
        others = self._copied - {stage}
        require(not others, f"copies to stages {others} arrive at stage {stage}")
        self._copied = set()
        del self._open[stage]
        self._filled[stage] = self._filled.get(stage, 0) + 1

    def end_filling(self, threads: int) -> None:
        """End the producer's part; it has `threads` threads."""
        require(not self._open and not self._copied, "the producer's last copies arrive nowhere")
        for stage in range(self.stages):
            require(self.full.counts.get(stage) == threads, f"not {threads} arrivals fill a stage")
            require(self.empty.counts.get(stage) == 1, "not one arrival releases a stage")
        self.consuming = True

    def _take(self, stage: int, phase: int) -> None:
        require(self.consuming, "the producer waits for a full stage")
        if stage in self._open:
            require(phase == self._taken[stage] & 1, f"another phase of stage {stage}")
            return
        number = stage + self._taken[stage] * self.stages
        require(phase == self._taken[stage] & 1, f"use {number} waits for another phase")
        require(number < len(self.uses), f"use {number} is waited for, but never filled: deadlock")
        require(
            number < self._unreleased + self.stages,
            f"deadlock: use {number} of {self.stages} stages is waited for, use {self._unreleased} is not released",
        )
        self._open[stage] = number

    def load(self, stage: int) -> int:
        require(stage in self._open, f"stage {stage} is loaded while it is not full")
        self._last_load[stage] = self.barriers
        return self._open[stage]

    def store(self, stage: int, path: tuple[int, ...]) -> None:
        require(stage in self._open, f"stage {stage} is written while it is not full")
        self._last_load[stage] = self.barriers
        self.uses[self._open[stage]].stored.append(path)

    def release(self, barrier: tuple[MBarriers, int], count: int) -> None:
        kind, stage = barrier
        require(kind is self.empty and count == 1, "another arrival")
        require(stage in self._open, f"stage {stage} is released twice")
        require(
            self._last_load[stage] < self.barriers,
            f"stage {stage} is released without a barrier behind its last load",
        )
        number = self._open.pop(stage)
        self._taken[stage] += 1
        self._released.add(number)
        while self._unreleased in self._released:
            self._released.remove(self._unreleased)
            self._unreleased += 1

    def end(self) -> None:
        require(
            self._unreleased == len(self.uses),
            f"{len(self.uses)} uses are filled, {self._unreleased} released",
        )
