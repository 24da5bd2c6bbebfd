"""Counters in memory that all front ends of a service share: one row of numbers per process.

A process writes only its own row and reads all rows, so that each process can report the sums. A restarted front end
continues its row. No lock is needed because reads and writes of aligned doubles are atomic.
"""

from __future__ import annotations

import array
import mmap
from pathlib import Path

_BYTES = 8


class SharedCounters:
    """Owns the rows; only `mine` may be written.

    Args:
        rows: rows of equal length, one per process.
        mine: index of this process's row.
    """

    def __init__(self, rows: list[memoryview[float]], mine: int) -> None:
        self.rows = rows
        self.mine = rows[mine]

    @classmethod
    def private(cls, cells: int) -> SharedCounters:
        """Make the counters of a single process: one row of zeros."""
        return cls([memoryview(array.array("d", bytes(_BYTES * cells)))], 0)

    @classmethod
    def shared(cls, path: Path, rows: int, cells: int, mine: int) -> SharedCounters:
        """Open the counters of several processes. If the file does not exist, create it with zeros.

        Args:
            path: the file.
            rows: number of processes.
            cells: numbers in a row.
            mine: index of this process's row.
        """
        with path.open("a+b") as file:
            file.truncate(_BYTES * rows * cells)
            memory = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        return cls([memory[i * cells : (i + 1) * cells] for i in range(rows)], mine)

    def total(self, cell: int) -> float:
        """Sum one number over all processes."""
        return sum(row[cell] for row in self.rows)

    def totals(self, count: int | None = None) -> list[float]:
        """Sum each of the first `count` numbers over all processes; None for all numbers."""
        rows = [list(row[:count]) for row in self.rows]
        return rows[0] if len(rows) == 1 else [sum(column) for column in zip(*rows, strict=True)]
