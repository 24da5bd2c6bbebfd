"""Kernel times and idle times of a GPU, computed from the intervals of a profile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Interval(NamedTuple):
    """One kernel or copy.

    Attributes:
        name: of the kernel or copy.
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
        launches: number of launches; in a `GPUProfile`, the average per step.
        microseconds: total time; in a `GPUProfile`, the average per step.
        added_us: the part of it after the end of all launches that began earlier. A kernel that begins while the one
            before runs, and waits for it, only adds the rest. All kernels together add the busy time.
    """

    name: str
    launches: float
    microseconds: float
    added_us: float


def idle_gaps(intervals: Iterable[Interval]) -> list[float]:
    """Return the microseconds of every gap between the intervals, which may overlap."""
    gaps = []
    end = None
    for _, start, stop in sorted(intervals, key=lambda interval: interval.start):
        if end is not None and start > end:
            gaps.append(start - end)
        end = stop if end is None else max(end, stop)
    return gaps


def busy_microseconds(intervals: Sequence[Interval]) -> float:
    """Return the time in which at least one interval ran."""
    if not intervals:
        return 0.0
    span = max(i.stop for i in intervals) - min(i.start for i in intervals)
    return span - sum(idle_gaps(intervals))


def totals(intervals: Iterable[Interval]) -> list[KernelTotal]:
    """Sum launches and times by kernel name; the one that adds most comes first."""
    sums: dict[str, tuple[float, float, float]] = {}
    end = -math.inf
    for name, start, stop in sorted(intervals, key=lambda interval: interval.start):
        launches, microseconds, added = sums.get(name, (0.0, 0.0, 0.0))
        added += max(0.0, stop - max(start, end))
        sums[name] = launches + 1, microseconds + stop - start, added
        end = max(end, stop)
    kernels = [KernelTotal(name, *values) for name, values in sums.items()]
    return sorted(kernels, key=lambda kernel: -kernel.added_us)


def read_profile(profile: torch.profiler.profile) -> Sequence[Interval]:
    """Return the kernels and copies of a finished profile, including those that a CUDA graph launched."""
    return [
        Interval(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or []  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
