"""Splits of a decode's keys, computed on the host: the reference for the list that the device makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class KVSplit(NamedTuple):
    """Keys `begin` to `end` of sequence `seq`."""

    seq: int
    begin: int
    end: int


def plan_splits(ranges: Sequence[tuple[int, int]], block_n: int, wanted: int) -> list[KVSplit]:
    """Split the keys of every sequence, as `kernels/attention/splits.py` describes.

    Args:
        ranges: for each sequence, the first key that any query sees, and the number of keys.
        block_n: keys of a tile.
        wanted: from `splits_wanted`.

    Returns:
        The splits in the order of the launch; those of a sequence are adjacent. A sequence without keys
        has one empty split.
    """
    firsts = [first // block_n for first, _ in ranges]
    tiles = [-(-stop // block_n) - first for first, (_, stop) in zip(firsts, ranges, strict=True)]
    chunk = max(1, -(-sum(tiles) // wanted))
    counts = [max(1, -(-total // chunk)) for total in tiles]
    longest = [-(-total // count) for total, count in zip(tiles, counts, strict=True)]
    splits: list[KVSplit] = []
    for seq in sorted(range(len(ranges)), key=lambda seq: -longest[seq]):
        first, total, count = firsts[seq], tiles[seq], counts[seq]
        stop = ranges[seq][1]
        for number in range(count):
            begin = first + number * total // count
            end = first + (number + 1) * total // count
            splits.append(KVSplit(seq, begin * block_n, min(end * block_n, stop)))
    return splits
