"""Runs of cache slots, and the choice between reading in place and gathering."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.problem import AttentionProblem, PagedBatch, Phase
from kernels.attention.pytorch.decode import divide
from kernels.attention.pytorch.paged_host import HostSequence, Run, host_sequences, slot_runs
from kernels.errors import ShapeError


@pytest.mark.parametrize(
    ("blocks", "start", "stop", "runs"),
    [
        ([3], 0, 5, [(48, 5)]),
        ([3, 4], 0, 17, [(48, 17)]),
        ([3, 5], 0, 17, [(48, 16), (80, 1)]),
        ([3, 4, 9, 10], 5, 60, [(53, 27), (144, 28)]),
        ([3, 4, 9], 16, 33, [(64, 16), (144, 1)]),
        ([5, 4, 3], 0, 48, [(80, 16), (64, 16), (48, 16)]),
        ([7, 99], 0, 16, [(112, 16)]),
    ],
    ids=["one block", "neighbours", "gap", "from inside", "from a boundary", "back", "unused tail"],
)
def test_runs_cover_the_tokens_in_order(blocks, start, stop, runs):
    assert list(slot_runs(blocks, start, stop, 16)) == [Run(*run) for run in runs]


@given(st.data())
def test_runs_hold_every_slot_once_and_are_the_fewest(data):
    size = data.draw(st.sampled_from([1, 4, 16]))
    blocks = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=12, unique=True))
    stop = data.draw(st.integers(1, len(blocks) * size))
    start = data.draw(st.integers(0, stop - 1))

    runs = slot_runs(blocks, start, stop, size)

    slots = [slot for run in runs for slot in range(run.slot, run.slot + run.length)]
    wanted = [blocks[token // size] * size + token % size for token in range(start, stop)]
    assert slots == wanted
    assert len(runs) == 1 + sum(b != a + 1 for a, b in itertools.pairwise(wanted))


def batch(offsets, lengths, table):
    tensors = [torch.tensor(part, dtype=torch.int32) for part in (offsets, lengths, table)]
    return PagedBatch(*tensors, num_tokens=9, max_seqlen_q=9, max_seqlen_k=99)


def problem(**more):
    return AttentionProblem(Phase.PREFILL, "float32", 2, 1, 8, 16, 1.0, **more)


def test_a_window_drops_the_tokens_that_no_query_sees():
    (found,) = host_sequences(
        problem(sliding_window=20), batch([0, 5], [100], [[9, 8, 7, 6, 5, 4, 3]])
    )

    assert found.history == 19
    assert found.num_keys == 24
    assert found.runs == (Run(5 * 16 + 12, 4), Run(4 * 16, 16), Run(3 * 16, 4))


@pytest.mark.parametrize(
    ("offsets", "lengths", "table", "message"),
    [
        ([1, 2], [5], [[0]], "cu_seqlens_q starts with 1; it must start with 0"),
        ([0, 3, 2], [5, 5], [[0], [1]], "sequence 1 has -1 query tokens"),
        ([0, 6], [5], [[0]], "sequence 0 has 6 query tokens and 5 tokens in the cache"),
        ([0, 1], [17], [[0]], "sequence 0 has 17 tokens, 2 blocks of 16; its block table has 1"),
        ([0, 1], [17], [[0, -1]], "sequence 0 has a negative block among its first 2"),
    ],
    ids=["start", "descending", "too many queries", "table too short", "negative block"],
)
def test_an_inconsistent_batch_is_rejected(offsets, lengths, table, message):
    with pytest.raises(ShapeError, match=message):
        host_sequences(problem(), batch(offsets, lengths, table))


def sequence(row, length, runs=1):
    share = length // runs
    parts = [share] * (runs - 1) + [length - share * (runs - 1)]
    return HostSequence(row, 1, length - 1, tuple(Run(1000 * i, n) for i, n in enumerate(parts)))


def rows(parts):
    return [item.row for item in parts]


def test_long_histories_are_read_in_place_and_short_ones_gathered_together():
    sequences = [sequence(0, 30), sequence(1, 500), sequence(2, 32)]
    sequences += [sequence(row, 31) for row in (3, 4, 5)]

    in_place, groups = divide(sequences, token_bytes=10, call_bytes=1000, group_bytes=10**6)

    assert rows(in_place) == [1]
    assert [sorted(rows(group)) for group in groups] == [[0, 2, 3, 4, 5]]


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_short_sequences_are_read_in_place(count):
    in_place, groups = divide([sequence(row, 5) for row in range(count)], 10, 1000, 10**6)

    assert rows(in_place) == list(range(count))
    assert groups == []


def test_a_sequence_of_many_short_runs_is_gathered_even_alone():
    in_place, groups = divide([sequence(0, 500, runs=20)], 10, 1000, 10**6)

    assert in_place == []
    assert [rows(group) for group in groups] == [[0]]


def test_two_long_runs_are_read_in_place():
    in_place, groups = divide([sequence(0, 500, runs=2)], 10, 1000, 10**6)

    assert rows(in_place) == [0]
    assert groups == []


def test_scattered_sequences_share_a_call_only_while_padding_takes_less_time():
    sequences = [sequence(0, 400, runs=10), sequence(1, 370, runs=10), sequence(2, 350, runs=10)]

    _, groups = divide(sequences, 10, 1000, 10**6)

    assert [rows(group) for group in groups] == [[0, 1], [2]]


def test_sequences_whose_padding_takes_longer_than_their_calls_are_read_in_place():
    sequences = [sequence(row, 90 - 15 * row) for row in range(5)]

    in_place, groups = divide(sequences, 10, 1000, 10**6)

    assert sorted(rows(in_place)) == [0, 1, 2, 3, 4]
    assert groups == []


def test_a_group_holds_no_more_than_its_limit_of_bytes():
    _, groups = divide([sequence(row, 10) for row in range(6)], 10, 1000, group_bytes=300)

    assert [rows(group) for group in groups] == [[0, 1, 2], [3, 4, 5]]
