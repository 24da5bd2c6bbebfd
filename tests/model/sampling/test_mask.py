from __future__ import annotations

import numpy as np
import pytest

from model.sampling.mask import build_masks
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
