"""Rows and results of a step by column."""

import pytest

from server.engine.core.step import NO_ROWS, DecodeRows, SampledRows, ScheduledSequence
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
    assert plain(sampled.by_row([1, 1, 1, 1, 0, 0])) == plain([*([it] for it in results), [], [], *prefill])
