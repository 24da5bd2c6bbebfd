"""Token masks: one bit for each token of the vocabulary says whether a row may sample it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from model.sampling.rows import SamplingRow

WORD_BITS = 32


class TokenMasks(NamedTuple):
    """The masks of a batch. Rows with the same banned ids share a mask; rows without banned ids have none.

    Attributes:
        bits: [K, ceil(V / 32)] int32, K >= 0: bit i % 32 of word i // 32 is 1 where token i may be sampled, as in
            xgrammar and llguidance. Bits from V on have no meaning.
        of_rows: for each row the index of its mask, -1 for none.
    """

    bits: npt.NDArray[np.int32]
    of_rows: list[int]

    def allowed(self, row: int, vocab_size: int) -> npt.NDArray[np.bool_] | None:
        """Return the mask of one row as [vocab_size] bool; None for none."""
        if self.of_rows[row] < 0:
            return None
        mask = self.bits[self.of_rows[row]]
        return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(
            np.bool_
        )


def build_masks(rows: Sequence[SamplingRow], vocab_size: int) -> TokenMasks:
    """Build the masks of a batch. Banned ids outside the vocabulary are ignored."""
    num_words = -(-vocab_size // WORD_BITS)
    indices: dict[tuple[int, ...], int] = {}
    of_rows = []
    for row in rows:
        banned = row.banned_ids()
        of_rows.append(indices.setdefault(banned, len(indices)) if banned else -1)
    if not indices:
        return TokenMasks(np.empty((0, num_words), np.int32), of_rows)
    allowed = np.ones((len(indices), num_words * WORD_BITS), np.bool_)
    for mask, banned in zip(allowed, indices, strict=True):
        mask[[token_id for token_id in banned if 0 <= token_id < vocab_size]] = False
    # Viewing bytes in id order as words is correct because hosts are little-endian.
    return TokenMasks(np.packbits(allowed, axis=1, bitorder="little").view(np.int32), of_rows)
