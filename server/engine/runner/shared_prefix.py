"""How many blocks the sequences of a step have in common, from their block tables.

Sequences share a block where the prefix cache gave it to them. Knows numbers of blocks only: whether
reading them once pays is the kernels' to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from numpy.typing import NDArray

    SharingPays: TypeAlias = Callable[[int, int], bool]
    """Whether to read once what so many sequences share, given as a number of tokens."""

_FIRST_COLUMNS: Final = 8
ALIGNMENT: Final = 4
"""Blocks: the rest of a table's row then begins at a multiple of 16 bytes, as whole rows do, so that the
kernels compiled for these serve it too."""


def shared_tokens(
    table: NDArray[np.int32], num_computed: int, block_size: int, pays: SharingPays
) -> int:
    """Count the tokens at the start of all sequences that should be read once.

    Args:
        table: [B, M] block ids, a row for each sequence, its own as far as `num_computed` tokens.
        num_computed: tokens that every sequence has before its first query.
        block_size: tokens per block.
        pays: asked once, with what they share.

    Returns:
        A multiple of `block_size`, at most `num_computed`; 0 where it does not pay.
    """
    if len(table) < 2:
        return 0
    blocks = shared_blocks(table, num_computed // block_size) // ALIGNMENT * ALIGNMENT
    tokens = blocks * block_size
    return tokens if tokens and pays(len(table), tokens) else 0


def shared_blocks(table: NDArray[np.int32], most: int) -> int:
    """Count the leading columns, at most `most`, in which all rows are equal.

    Columns are compared in stretches that grow, so it takes time in proportion to what is shared.
    """
    most = min(most, table.shape[1])
    done, step = 0, _FIRST_COLUMNS
    while done < most:
        stretch = table[:, done : min(done + step, most)]
        equal = (stretch == stretch[0]).all(axis=0)
        if not equal.all():
            return done + int(np.argmin(equal))
        done += stretch.shape[1]
        step *= 4
    return done
