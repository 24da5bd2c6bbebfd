"""Counters in memory that all front ends of a service share: one row of numbers per process.

A process writes only its own row and reads all rows, so that each process can report the sums. A restarted front end
continues its row. No lock is needed because reads and writes of aligned doubles are atomic.
"""

from __future__ import annotations

import array
import mmap

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

    @staticmethod
    def num_bytes(rows: int, cells: int) -> int:
        """Return the size of the memory that `shared` needs."""
        return _BYTES * rows * cells

    @classmethod
    def shared(cls, descriptor: int, rows: int, cells: int, mine: int) -> SharedCounters:
        """Open the counters of several processes.

        Args:
            descriptor: of memory of `num_bytes`, zeros before the first process writes.
            rows: number of processes.
            cells: numbers in a row.
            mine: index of this process's row.
        """
        memory = memoryview(mmap.mmap(descriptor, cls.num_bytes(rows, cells))).cast("d")
        return cls([memory[i * cells : (i + 1) * cells] for i in range(rows)], mine)

    def total(self, cell: int) -> float:
        """Sum one number over all processes."""
        return sum(row[cell] for row in self.rows)

    def totals(self, count: int | None = None) -> list[float]:
        """Sum each of the first `count` numbers over all processes; None for all numbers."""
        rows = [list(row[:count]) for row in self.rows]
        return rows[0] if len(rows) == 1 else [sum(column) for column in zip(*rows, strict=True)]
