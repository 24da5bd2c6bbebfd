"""Counts the blocks that the sequences of a step have in common: the prefix cache gave them to each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from server.engine.core.step import ScheduledSequence

    SharingPays: TypeAlias = Callable[[int, int], bool]
    """(sequences, tokens that they share) -> whether to read these once for all."""

ALIGNMENT: Final = 4
"""Blocks: the rest of a table's row then begins at a multiple of 16 bytes, as whole rows do, so that the
kernels compiled for these serve it too."""
_FIRST_COLUMNS: Final = 8


def shared_blocks(
    decode: Sequence[ScheduledSequence], block_size: int, pays: SharingPays | None
) -> int:
    """Count the blocks at the start of all sequences that should be read once.

    Args:
        decode: sequences with one token each.
        block_size: tokens per block.
        pays: asked once, with what they share; None where no kernel reads a prefix once.

    Returns:
        A multiple of `ALIGNMENT`, before the first token of every sequence; 0 where it does not pay.
    """
    if pays is None or len(decode) < 2:
        return 0
    tables = [s.sequence.block_table for s in decode]
    computed = min(s.start for s in decode) // block_size
    blocks = common_blocks(tables, computed) // ALIGNMENT * ALIGNMENT
    return blocks if blocks and pays(len(decode), blocks * block_size) else 0


def common_blocks(tables: Sequence[list[int]], most: int) -> int:
    """Count the leading entries, at most `most`, in which all tables are equal.

    Entries are compared in stretches that grow, so it takes time in proportion to what is shared.
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
