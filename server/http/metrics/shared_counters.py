"""What a service counts, in memory that all of its front ends see: a row of numbers for each process.

A process writes its own row and reads them all, so that any of them can tell the sums, and a front end that is started
again goes on where it was. Aligned doubles are read whole, so there is no lock. Knows nothing of what a number means.
"""

from __future__ import annotations

import array
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_BYTES = 8


class Board:
    """Owns the rows; `mine` is this process's.

    Args:
        rows: of equal length.
        mine: index of the row to write.
    """

    def __init__(self, rows: list[memoryview[float]], mine: int) -> None:
        self.rows = rows
        self.mine = rows[mine]

    @classmethod
    def private(cls, cells: int) -> Board:
        """Make the board of a lone process: one row of zeros."""
        return cls([memoryview(array.array("d", bytes(_BYTES * cells)))], 0)

    @classmethod
    def shared(cls, path: Path, rows: int, cells: int, mine: int) -> Board:
        """Open the board of several processes, and make it, of zeros, where there is none.

        Args:
            path: of its file.
            rows: number of processes.
            cells: numbers in a row.
            mine: which of the rows is this process's.
        """
        with path.open("a+b") as file:
            file.truncate(_BYTES * rows * cells)
            memory = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        return cls([memory[i * cells : (i + 1) * cells] for i in range(rows)], mine)

    def total(self, cell: int) -> float:
        """One number, over all processes."""
        return sum(row[cell] for row in self.rows)

    def totals(self) -> list[float]:
        """All numbers, over all processes."""
        return [sum(column) for column in zip(*self.rows, strict=True)]
