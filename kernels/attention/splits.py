"""How a decode's keys are split over thread blocks; pure, the same arithmetic as on the device.

    wanted = programs the GPU holds at once / programs that one split takes
    chunk  = ceil(tiles of all sequences / wanted), in tiles of keys
    splits of a sequence = ceil(its tiles / chunk), at least 1; its tiles divided evenly among them
    order of the launch = the sequences with the longest splits first

So a long sequence gets more splits than a short one beside it, and their number never exceeds
wanted + B, whatever the lengths: a launch of that many is right for every step with B sequences,
and a captured graph may be replayed as the lengths grow. Where a batch has more splits than the GPU
holds at once, the last to start are the shortest: a long one that starts late reads alone at the end.

Source: our own; the chunk common to all sequences is that of FlashInfer's decode plan (Ye et al., 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_INVARIANT_SPLIT_TOKENS = 2048
"""Keys of a split where the split must not depend on the batch."""


class KVSplit(NamedTuple):
    """Keys `begin` to `end` of sequence `seq`."""

    seq: int
    begin: int
    end: int


def splits_wanted(num_sms: int, programs_per_sm: int, programs_per_split: int) -> int:
    """Return how many splits fill a GPU.

    Args:
        num_sms: of the GPU.
        programs_per_sm: thread blocks that an SM holds at once.
        programs_per_split: thread blocks of one split, one for each tile of query rows.
    """
    return max(1, num_sms * programs_per_sm // programs_per_split)


def split_bound(num_seqs: int, max_seqlen_k: int, block_n: int, wanted: int, fixed: int) -> int:
    """Return the most splits that a step can have, whatever its lengths.

    Args:
        num_seqs: B.
        max_seqlen_k: upper bound of the lengths, tokens.
        block_n: keys of a tile.
        wanted: from `splits_wanted`.
        fixed: tiles of a split, or 0 where `wanted` decides.
    """
    if fixed:
        return num_seqs * max(1, -(-max_seqlen_k // (block_n * fixed)))
    return num_seqs + wanted


def prefix_parts(num_keys: int, block_n: int, wanted: int) -> int:
    """Return into how many parts the keys that all sequences share are split.

    Args:
        num_keys: tokens that they share, at least 1.
        block_n: keys of a tile.
        wanted: from `splits_wanted`, where a split's programs are the tiles of all rows of the batch.
    """
    return min(wanted, -(-num_keys // block_n))


def plan_splits(
    ranges: Sequence[tuple[int, int]], block_n: int, wanted: int, fixed: int = 0
) -> list[KVSplit]:
    """Split the keys of every sequence.

    Args:
        ranges: first key that any query sees, and number of keys, of each sequence.
        block_n: keys of a tile.
        wanted: from `splits_wanted`.
        fixed: tiles of a split, or 0 where `wanted` decides.

    Returns:
        The splits in the order of the launch, those of a sequence side by side; a sequence with
        nothing to attend to has one, empty.
    """
    firsts = [first // block_n for first, _ in ranges]
    tiles = [-(-stop // block_n) - first for first, (_, stop) in zip(firsts, ranges, strict=True)]
    chunk = fixed or max(1, -(-sum(tiles) // wanted))
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
