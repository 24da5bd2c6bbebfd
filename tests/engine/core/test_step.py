"""Rows and results of a step by column."""

import pytest

from server.engine.core.step import (
    NO_ROWS,
    DecodeBatch,
    DecodeRows,
    SampledRows,
    ScheduledSequence,
)
from tests.engine.core.bookkeeping import Token, make_sequence

ROWS = [ScheduledSequence(make_sequence(i, 4), i, 1, int(i < 2)) for i in range(3)]


def test_decode_rows_are_read_as_the_rows_they_were_made_of():
    decode = DecodeRows.of(ROWS)

    assert [*decode] == decode[:] == ROWS
    assert (decode[1], decode[-1], decode[1:]) == (ROWS[1], ROWS[2], ROWS[1:])
    assert (decode.num_logits, decode.starts, decode.batch.request_ids) == (2, [0, 1, 2], [0, 1, 2])
    assert ROWS[2] in decode
    assert not NO_ROWS
    with pytest.raises(IndexError):
        decode[3]


def test_rows_without_logits_come_last():
    with pytest.raises(AssertionError, match="come last"):
        DecodeRows.of(ROWS[::-1])


def test_sampled_rows_return_the_results_they_were_made_of():
    results = [
        Token(5),
        Token(6, -0.5),
        Token(7, -0.25, ((7, -0.25), (8, -2.0))),
        Token(None, error="not a number"),
    ]
    prefill = [[Token(9), Token(10)], []]
    sampled = SampledRows.of(results, prefill)

    def plain(rows):
        return [[(it.token_id, it.logprob, it.top, it.error) for it in row] for row in rows]

    assert sampled.token_ids == [5, 6, -1, -1]
    assert sampled.logprobs == {1: -0.5}
    assert plain(sampled.by_row([1, 1, 1, 1, 0, 0])) == plain(
        [*([it] for it in results), [], [], *prefill]
    )


DRAFTED = [
    ScheduledSequence(make_sequence(0, 4), 3, 3, 3, (8, 9)),
    ScheduledSequence(make_sequence(1, 4), 3, 1, 1),
    ScheduledSequence(make_sequence(2, 4), 3, 2, 2, (7,)),
    ScheduledSequence(make_sequence(3, 4), 1, 1, 0),
]


def test_rows_with_drafts_are_read_as_the_rows_they_were_made_of():
    decode = DecodeRows.of(DRAFTED)

    assert [*decode] == DRAFTED
    assert (decode.num_sampling, decode.num_logits, decode.num_tokens) == (3, 6, 7)
    assert decode.drafts == [(8, 9), (), (7,), ()]
    assert [it.request_id for it in decode.sampling_sequences] == [0, 0, 0, 1, 2, 2]
    assert DecodeRows.of(ROWS).drafts is None


def test_a_row_with_a_draft_samples_at_the_position_after_each_of_its_tokens():
    assert [list(row.sampled_positions) for row in DRAFTED] == [[4, 5, 6], [4], [4, 5], []]
    chunk = ScheduledSequence(make_sequence(0, 9), 2, 7, 1)
    assert [*chunk.sampled_positions] == [9]
    assert [row.is_decode for row in (*DRAFTED, chunk)] == [True] * 4 + [False]


def test_a_row_without_logits_has_no_draft():
    with pytest.raises(AssertionError, match="no draft"):
        DecodeRows(DecodeBatch([DRAFTED[0].sequence]), [3], 0, [(8,)])


def test_the_results_of_rows_with_drafts_are_lists_in_order():
    results = [Token(5), Token(6, -0.5), Token(None, error="not a number"), Token(8)]
    sampled = SampledRows.of(results, [[Token(9)]])

    rows = sampled.by_row([3, 0, 1])

    assert [[(it.token_id, it.logprob, it.error) for it in row] for row in rows] == [
        [(5, None, None), (6, -0.5, None), (None, None, "not a number")],
        [],
        [(8, None, None)],
        [(9, None, None)],
    ]
