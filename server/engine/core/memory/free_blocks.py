"""A set of block ids as runs of consecutive ids, which finds a large run in constant time."""

from __future__ import annotations

from collections import OrderedDict


class FreeBlocks:
    """A set of block ids, stored as maximal runs ("stretches") `start .. stop`, stop exclusive.

    Stretches are grouped by the bit length of their size: class c holds sizes 2^(c-1) .. 2^c - 1. A
    bit mask records which classes are not empty. Every operation takes constant time, and `largest`
    returns a stretch of more than half the size of the largest one.

    Invariants: stretches neither overlap nor touch; `num_free` is the sum of their sizes.
    """

    __slots__ = ("_classes", "_mask", "_start_of", "_stop_of", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self.num_free = 0
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._classes: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(num_blocks.bit_length() + 1)
        ]
        self._mask = 0
        self._insert(0, num_blocks)

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """All stretches as (start, stop), ordered by block id."""
        return sorted(self._stop_of.items())

    def size_from(self, start: int) -> int:
        """Return the size of the stretch that begins at `start`; 0 if none does."""
        return self._stop_of.get(start, start) - start

    def largest(self) -> tuple[int, int]:
        """Return (start, stop) of a stretch more than half as long as the longest. At least one block must be free."""
        start = next(iter(self._classes[self._mask.bit_length() - 1]))
        return start, self._stop_of[start]

    def take(self, start: int, offset: int, count: int) -> None:
        """Remove the blocks `start + offset .. start + offset + count` of the stretch at `start`."""
        stop = self._stop_of[start]
        first = start + offset
        self._remove(start, stop)
        if offset:
            self._insert(start, first)
        if first + count < stop:
            self._insert(first + count, stop)

    def release(self, block: int) -> None:
        """Add a block that is not in the set, and merge it with adjacent stretches."""
        start = self._start_of.get(block, block)
        stop = self._stop_of.get(block + 1, block + 1)
        if start < block:
            self._remove(start, block)
        if stop > block + 1:
            self._remove(block + 1, stop)
        self._insert(start, stop)

    def check_invariants(self) -> None:
        """Assert that the stretches are maximal, that each is in its class, and that `num_free` is their sum."""
        before = -1
        for start, stop in self.stretches:
            assert before < start < stop, f"stretch {start}..{stop} overlaps or touches {before}"
            assert self._start_of[stop] == start
            assert start in self._classes[(stop - start).bit_length()]
            before = stop
        assert len(self._start_of) == len(self._stop_of)
        assert sum(map(len, self._classes)) == len(self._stop_of)
        assert self._mask == sum(1 << c for c, members in enumerate(self._classes) if members)
        assert self.num_free == sum(stop - start for start, stop in self.stretches)

    def _insert(self, start: int, stop: int) -> None:
        size = stop - start
        self._stop_of[start] = stop
        self._start_of[stop] = start
        size_class = size.bit_length()
        self._classes[size_class][start] = None
        self._mask |= 1 << size_class
        self.num_free += size

    def _remove(self, start: int, stop: int) -> None:
        size = stop - start
        del self._stop_of[start]
        del self._start_of[stop]
        size_class = size.bit_length()
        members = self._classes[size_class]
        del members[start]
        if not members:
            self._mask &= ~(1 << size_class)
        self.num_free -= size
