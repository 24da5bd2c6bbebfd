from __future__ import annotations

import numpy as np
import pytest

from model.sampling.mask import HostMasks, RowMasks, build_masks
from tests.model.sampling.sampling_rows import sampling_row


def test_bit_i_of_the_mask_is_one_if_token_i_may_be_sampled() -> None:
    masks = build_masks([sampling_row(banned=(0, 31, 33, 99))], vocab_size=100)

    assert masks.bits.dtype == np.int32
    assert masks.bits.shape == (1, 4)
    words = masks.bits.view(np.uint32)[0].tolist()
    assert words == [0x7FFFFFFE, 0xFFFFFFFD, 0xFFFFFFFF, 0xFFFFFFF7]


def test_rows_without_banned_ids_have_no_mask_and_rows_with_the_same_banned_ids_share_one() -> None:
    rows = [sampling_row(), sampling_row(banned=(3,)), sampling_row(banned=(4,)), sampling_row()]

    assert build_masks([*rows, rows[1]], 50).of_rows == [-1, 0, 1, -1, 0]
    assert build_masks(rows[:1], 50).bits.shape == (0, 2)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_a_mask_round_trips_and_ignores_ids_outside_the_vocabulary(vocab) -> None:
    banned = {0, vocab // 2, vocab - 1}
    masks = build_masks([sampling_row(banned=(*banned, vocab, vocab + 40, -1))], vocab)

    allowed = masks.allowed(0, vocab)

    assert allowed.dtype == np.bool_
    assert set(np.flatnonzero(~allowed).tolist()) == banned


def test_memory_for_the_masks_of_grammars_grows_and_keeps_what_was_written() -> None:
    masks = HostMasks(np.zeros((2, 4), np.int32))
    masks.words[1] = [1, 2, 3, 4]

    sizes = []
    for num_slots in (2, 3, 100, 50, 101):
        masks.reserve(num_slots)
        sizes.append(len(masks.words))
        assert len(masks.words) >= num_slots

    # At least 16, then at least twice as many, so that few copies are made; never fewer.
    assert sizes == [2, 16, 100, 100, 200]
    assert masks.words[1].tolist() == [1, 2, 3, 4]
    assert not masks.words[2:].any()
    assert masks.words.dtype == np.int32
    assert masks.words.shape[1] == 4


def test_a_row_s_mask_is_that_of_its_grammar_without_its_banned_ids() -> None:
    words = np.array([[0b1110, -1], [0b0111, 0b11]], np.int32)
    of_grammars = RowMasks(HostMasks(words), [1, -1, 0, 1])
    rows = [
        sampling_row(banned=(0, 33)),
        sampling_row(banned=(2,)),
        sampling_row(),
        sampling_row(banned=(5,)),
    ]

    masks = build_masks(rows, 40, of_grammars)

    allowed = [set(np.flatnonzero(masks.allowed(i, 40)).tolist()) for i in range(4)]
    assert allowed[0] == {1, 2, 32}
    assert allowed[1] == set(range(40)) - {2}
    assert allowed[2] == {1, 2, 3, *range(32, 40)}
    assert allowed[3] == {0, 1, 2, 32, 33}
    assert words.tolist() == [[0b1110, -1], [0b0111, 0b11]], "the grammars' masks stay as they are"
