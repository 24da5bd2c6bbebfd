"""Counts the leading blocks that all decode sequences of a step share through the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from server.engine.core.step import DecodeRows

    SharingRule: TypeAlias = Callable[[int, int], bool]
    """(number of sequences, tokens that they share) -> whether the shared tokens are read once for all sequences."""

ALIGNMENT: Final = 4
"""Unit of shared blocks. The rest of a row of the block table then begins at a multiple of 16 bytes, like a whole row,
so that kernels compiled for whole rows can be used."""
_FIRST_COLUMNS: Final = 8


def shared_blocks(decode: DecodeRows, block_size: int, rule: SharingRule | None) -> int:
    """Count the leading blocks of all sequences that should be read once.

    Args:
        decode: the decode rows.
        block_size: tokens per block.
        rule: decides whether shared tokens are read once; None if no kernel supports it.

    Returns:
        A multiple of `ALIGNMENT`. The blocks end before the step's first token of every sequence. 0 if each sequence
        should read its own.
    """
    if rule is None or len(decode) < 2:
        return 0
    tables = [sequence.block_table for sequence in decode.batch.sequences]
    computed = min(decode.starts) // block_size
    blocks = common_blocks(tables, computed) // ALIGNMENT * ALIGNMENT
    return blocks if blocks and rule(len(decode), blocks * block_size) else 0


def common_blocks(tables: Sequence[list[int]], most: int) -> int:
    """Count the leading entries, at most `most`, in which all tables are equal.

    Compares entries in growing slices, so that the time is proportional to the shared entries.
    """
    first = tables[0]
    most = min(most, *map(len, tables))
    done, step = 0, _FIRST_COLUMNS
    while done < most:
        stop = min(done + step, most)
        stretch = first[done:stop]
        if not all(table[done:stop] == stretch for table in tables):
            return next(i for i in range(done, stop) if any(t[i] != first[i] for t in tables))
        done = stop
        step *= 4
    return done
