"""What a program of a single launch does in memory that other programs see, and the record of a launch."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

EXCHANGED: Final = ("hidden", "between", "qkv", "inner", "parts", "logs", "mixed")
"""Arguments of the kernels with two halves, through which the programs exchange the vectors of a layer."""
PARTIALS: Final = ("best", "totals")
"""Arguments through which they exchange the results of the output head."""


class ScheduleError(AssertionError):
    """A launch is not proved correct; the text says where."""


def require(holds: Any, *words: Any) -> None:
    """Raise `ScheduleError` with the words of a text unless `holds`."""
    if not holds:
        raise ScheduleError(" ".join(map(str, words)))


@dataclasses.dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier of the program's consumers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fence:
    """A fence that is acquire and release for the GPU, executed by one thread."""

    thread: int


@dataclasses.dataclass(frozen=True, slots=True)
class Arrive:
    """An addition of 1 to a counter by one thread."""

    counter: int
    order: str
    thread: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """A wait of one thread until a counter has a number of arrivals."""

    counter: int
    arrivals: int
    order: str
    thread: int


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Loads, polls or stores of some places of a buffer.

    Attributes:
        kind: "load", "poll", which ends when no place is empty, "store" or "clear".
        buffer: name of the kernel's argument, or of a field of the table of addresses.
        places: number of a set in `Places`.
        layer: in which this is done; LAYERS behind the last one.
        strong: whether the accesses are relaxed, else weak.
        value: what is stored, if it is an integer.
    """

    kind: str
    buffer: str
    places: int
    layer: int
    strong: bool
    value: int | None = None


class Places:
    """Sets of places of buffers, each with a number."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.sets: list[np.ndarray] = []

    def number(self, places: np.ndarray) -> int:
        """Return the number of the set of these places, [n] int64 in any order."""
        key = places.tobytes()
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.sets)
            self.sets.append(places)
        return found


@dataclasses.dataclass
class Record:
    """What the programs of a launch do.

    Attributes:
        c: constants of the kernel.
        base: the half that layer 0 writes.
        programs: events of each program's consumers, in order.
        places: the sets that they name.
        sizes: elements of each buffer.
        attended: of each (layer, row, query head), the stages of keys of each split, (first, last + 1).
        positions: of each row, as are `slots` and `sequences`.
        windows: of each layer, tokens that it attends; 0 if all.
        columns: blocks of a sequence; those of sequence i begin with block i * columns.
    """

    c: Any
    base: int
    programs: list[list[Any]]
    places: Places
    sizes: dict[str, int]
    attended: dict[tuple[int, int, int], list[tuple[int, int]]]
    positions: np.ndarray
    slots: np.ndarray
    sequences: np.ndarray
    windows: list[int]
    columns: int
