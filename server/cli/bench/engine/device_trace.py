"""What a GPU did between two moments: kernels, how long each took, and when it did nothing. Arithmetic on intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Interval(NamedTuple):
    """One kernel or copy.

    Attributes:
        name: of the kernel.
        start, stop: microseconds.
    """

    name: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All launches of one kernel.

    Attributes:
        name: of the kernel.
        launches: how many; on average, where it stands for one of many steps.
        microseconds: in all, likewise.
    """

    name: str
    launches: float
    microseconds: float


def idle_gaps(intervals: Iterable[Interval]) -> list[float]:
    """Microseconds of every pause between them; on several streams, or with an early start, they overlap."""
    gaps = []
    end = None
    for _, start, stop in sorted(intervals, key=lambda interval: interval.start):
        if end is not None and start > end:
            gaps.append(start - end)
        end = stop if end is None else max(end, stop)
    return gaps


def busy_microseconds(intervals: Sequence[Interval]) -> float:
    """Time in which at least one of them ran."""
    if not intervals:
        return 0.0
    span = max(i.stop for i in intervals) - min(i.start for i in intervals)
    return span - sum(idle_gaps(intervals))


def totals(intervals: Iterable[Interval]) -> list[KernelTotal]:
    """Sum up by name, the longest first."""
    sums: dict[str, tuple[float, float]] = {}
    for name, start, stop in intervals:
        launches, microseconds = sums.get(name, (0.0, 0.0))
        sums[name] = launches + 1, microseconds + stop - start
    kernels = [KernelTotal(name, *values) for name, values in sums.items()]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


def read_profile(profile: torch.profiler.profile) -> Sequence[Interval]:
    """The kernels and copies of a profile that has ended, whether launched one by one or by a graph."""
    return [
        Interval(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or []  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
