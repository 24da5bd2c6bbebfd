"""Token masks: one bit for each token of the vocabulary says whether a row may sample it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from model.sampling.rows import SamplingRow

WORD_BITS = 32
_FEWEST_SLOTS: Final = 16


class HostMasks:
    """Masks of grammars by slot, in the host's memory.

    Attributes:
        words: [S, num_words] int32, the masks as in `TokenMasks`. Written only after `wait`.

    Args:
        words: [S, num_words] int32 contiguous.
    """

    def __init__(self, words: npt.NDArray[np.int32]) -> None:
        self.words = words

    def reserve(self, num_slots: int) -> None:
        """Make place for some slots; the masks stay."""
        if num_slots > len(self.words):
            count = max(_FEWEST_SLOTS, 2 * len(self.words), num_slots)
            words = np.zeros((count, self.words.shape[1]), np.int32)
            words[: len(self.words)] = self.words
            self.words = words

    def wait(self) -> None:
        """Wait until `words` may be written."""


class RowMasks(NamedTuple):
    """The masks of grammars that some rows have.

    Attributes:
        masks: of all sequences with a grammar.
        slots: for each row the slot of its mask, -1 for none.
    """

    masks: HostMasks
    slots: Sequence[int]


class TokenMasks(NamedTuple):
    """The masks of a batch.

    Rows without a grammar share a mask if they have the same banned ids, and have none without banned ids.

    Attributes:
        bits: [K, ceil(V / 32)] int32, K >= 0: bit i % 32 of word i // 32 is 1 where token i may be sampled, as in
            llguidance. Bits from V on have no meaning.
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


def build_masks(
    rows: Sequence[SamplingRow], vocab_size: int, of_grammars: RowMasks | None = None
) -> TokenMasks:
    """Build the masks of a batch: what a row's grammar allows, without its banned ids.

    Args:
        rows: of the batch.
        vocab_size: V. Banned ids outside the vocabulary are ignored.
        of_grammars: the masks of the rows' grammars; None if no row has one.
    """
    num_words = -(-vocab_size // WORD_BITS)
    indices: dict[tuple[int, ...], int] = {}
    of_rows: list[int] = []
    grammars: list[tuple[int, tuple[int, ...]]] = []
    for i, row in enumerate(rows):
        banned = row.banned_ids() if row.parameters.bans_tokens else ()
        if of_grammars is not None and of_grammars.slots[i] >= 0:
            grammars.append((i, banned))
            of_rows.append(-1)
        else:
            of_rows.append(indices.setdefault(banned, len(indices)) if banned else -1)
    bits = np.empty((len(indices) + len(grammars), num_words), np.int32)
    if indices:
        bits[: len(indices)] = _allow_others(indices, vocab_size)
    for mask, (i, banned) in enumerate(grammars, len(indices)):
        assert of_grammars is not None
        bits[mask] = of_grammars.masks.words[of_grammars.slots[i], :num_words]
        if banned:
            bits[mask] &= _allow_others([banned], vocab_size)[0]
        of_rows[i] = mask
    return TokenMasks(bits, of_rows)


def _allow_others(
    banned_ids: Collection[tuple[int, ...]], vocab_size: int
) -> npt.NDArray[np.int32]:
    """Return one mask for each group of ids that allows all other ids."""
    num_words = -(-vocab_size // WORD_BITS)
    allowed = np.ones((len(banned_ids), num_words * WORD_BITS), np.bool_)
    for mask, banned in zip(allowed, banned_ids, strict=True):
        mask[[token_id for token_id in banned if 0 <= token_id < vocab_size]] = False
    # Viewing bytes in id order as words is correct because hosts are little-endian.
    return np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
