"""The number of parts that a decode's keys are split into (split-KV), so that thread blocks fill the GPU.

    wanted = programs the GPU holds at once / programs that one split takes
    chunk  = ceil(tiles of all sequences / wanted), in tiles of keys
    splits of a sequence = ceil(its tiles / chunk), at least 1; its tiles divided evenly among them
    order of the launch = the sequences with the longest splits first

A long sequence thus gets more splits than a short one. The total never exceeds wanted + B, whatever the lengths, so
a launch of that many fits every step of B sequences, and a captured CUDA graph can be replayed as the lengths grow.
If a batch has more splits than the GPU holds at once, the shortest start last, because a long split that started
late would run alone at the end.

The device lists the splits (`kernels/attention/portable/split_list.py`).

Source: our own; a chunk size common to all sequences is from FlashInfer's decode plan (Ye et al., 2025).
"""

from __future__ import annotations


def splits_wanted(num_sms: int, programs_per_sm: int, programs_per_split: int) -> int:
    """Return the number of splits that fill a GPU.

    Args:
        num_sms: SMs of the GPU.
        programs_per_sm: thread blocks that an SM holds at once.
        programs_per_split: thread blocks of one split, one for each tile of query rows.
    """
    return max(1, num_sms * programs_per_sm // programs_per_split)


def prefix_parts(num_keys: int, block_n: int, wanted: int) -> int:
    """Return the number of parts that the keys shared by all sequences are split into.

    Args:
        num_keys: shared tokens, at least 1.
        block_n: keys of a tile.
        wanted: from `splits_wanted`; a split's programs are the tiles of all rows of the batch.
    """
    return min(wanted, -(-num_keys // block_n))
