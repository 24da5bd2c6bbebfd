"""Measures how much processor time other programs take during a measurement.

llama.cpp's threads wait for each other in a busy loop after every operation, so that other load slows it far more than
its share of the processor; figures with other load do not compare anything.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT: Final = 0.1
"""Cores; a part with more other load than this is reported."""
_STAT = Path("/proc/stat")
_IDLE, _IO_WAIT, _STEAL = 3, 4, 7


def busy_seconds(line: str, ticks: int) -> float:
    """Return the busy processor seconds of the first line of /proc/stat, with those that a hypervisor took away."""
    times = [int(word) for word in line.split()[1 : _STEAL + 2]]
    return (sum(times) - times[_IDLE] - times[_IO_WAIT]) / ticks


@contextlib.contextmanager
def other_load() -> Iterator[list[float]]:
    """Measure the cores that other programs keep busy.

    Yields:
        A list to which the average number of cores is added at the end; it stays empty without a /proc/stat. Child
        processes must have ended and been waited for.
    """
    out: list[float] = []
    if not _STAT.exists():
        yield out
        return
    began, start, own = time.perf_counter(), _busy(), _own()
    yield out
    others = _busy() - start - (_own() - own)
    out.append(max(0.0, others / (time.perf_counter() - began)))


def _busy() -> float:
    with _STAT.open() as file:
        return busy_seconds(file.readline(), os.sysconf("SC_CLK_TCK"))


def _own() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])
