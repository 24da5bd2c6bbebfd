"""The splits of a decode: every key is in exactly one, and there are never more than the bound."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.splits import splits_wanted
from tests.kernels.attention.reference_splits import KVSplit, plan_splits

BLOCK_NS = st.sampled_from([16, 32, 64, 128])
WANTED = st.integers(1, 600)


@st.composite
def key_ranges(draw, max_size=40):
    """Generate, for each sequence, the first key that any query sees and the number of keys."""
    lengths = draw(st.lists(st.integers(0, 20_000), min_size=1, max_size=max_size))
    return [(draw(st.integers(0, length)), length) for length in lengths]


def splits_of(splits, seq):
    return [split for split in splits if split.seq == seq]


@given(key_ranges(), BLOCK_NS, WANTED)
def test_every_key_is_in_one_split_and_splits_are_in_order(ranges, block_n, wanted):
    splits = plan_splits(ranges, block_n, wanted)

    order = [seq for seq, _ in itertools.groupby(splits, key=lambda split: split.seq)]
    assert sorted(order) == list(range(len(ranges)))
    for seq, (first, stop) in enumerate(ranges):
        mine = splits_of(splits, seq)
        assert mine[0].begin == first // block_n * block_n
        assert mine[-1].end == stop
        assert all(a.end == b.begin for a, b in itertools.pairwise(mine))


@given(key_ranges(), BLOCK_NS, WANTED)
def test_splits_begin_at_the_edge_of_a_tile(ranges, block_n, wanted):
    assert all(split.begin % block_n == 0 for split in plan_splits(ranges, block_n, wanted))


@given(key_ranges(), BLOCK_NS, WANTED)
def test_there_are_never_more_splits_than_wanted_and_sequences(ranges, block_n, wanted):
    assert len(plan_splits(ranges, block_n, wanted)) <= len(ranges) + wanted


@given(key_ranges(), BLOCK_NS, WANTED)
def test_the_tiles_of_a_sequence_are_divided_evenly(ranges, block_n, wanted):
    splits = plan_splits(ranges, block_n, wanted)

    for seq in range(len(ranges)):
        tiles = [-(-(split.end - split.begin) // block_n) for split in splits_of(splits, seq)]
        assert max(tiles) - min(tiles) <= 1


@given(key_ranges(), BLOCK_NS, WANTED)
def test_the_sequences_with_the_longest_splits_come_first(ranges, block_n, wanted):
    splits = plan_splits(ranges, block_n, wanted)

    longest = {
        seq: max(-(-(split.end - split.begin) // block_n) for split in splits_of(splits, seq))
        for seq in range(len(ranges))
    }
    order = [seq for seq, _ in itertools.groupby(splits, key=lambda split: split.seq)]
    assert order == sorted(order, key=lambda seq: (-longest[seq], seq))


@given(st.integers(1, 64), st.integers(0, 20_000), BLOCK_NS, WANTED)
def test_sequences_of_one_length_keep_their_order(num_seqs, length, block_n, wanted):
    splits = plan_splits([(0, length)] * num_seqs, block_n, wanted)

    assert [split.seq for split in splits] == sorted(split.seq for split in splits)


@given(key_ranges(max_size=8), BLOCK_NS, WANTED)
def test_no_split_is_longer_than_the_share_of_a_program(ranges, block_n, wanted):
    splits = plan_splits(ranges, block_n, wanted)

    tiles = [-(-(split.end - split.begin) // block_n) for split in splits]
    all_tiles = sum(-(-stop // block_n) - first // block_n for first, stop in ranges)
    assert max(tiles) <= max(1, -(-all_tiles // wanted))


@given(BLOCK_NS, WANTED)
def test_a_sequence_without_keys_has_one_empty_split(block_n, wanted):
    splits = plan_splits([(0, 0), (0, 100), (0, 0)], block_n, wanted)

    assert splits_of(splits, 0) == [KVSplit(0, 0, 0)]
    assert splits_of(splits, 2) == [KVSplit(2, 0, 0)]


def test_one_long_sequence_is_split_over_the_whole_gpu():
    wanted = splits_wanted(num_sms=132, programs_per_sm=2, programs_per_split=8)

    splits = plan_splits([(0, 16_384)], 64, wanted)

    assert wanted == 33
    assert len(splits) == 32
    assert splits[0] == KVSplit(0, 0, 512)


def test_a_batch_that_fills_the_gpu_is_not_split():
    wanted = splits_wanted(num_sms=132, programs_per_sm=2, programs_per_split=8)

    assert len(plan_splits([(0, 1024)] * 64, 64, wanted)) == 64


def test_a_long_sequence_gets_more_splits_than_a_short_one():
    splits = plan_splits([(0, 64), (0, 8192)], 64, wanted=33)

    assert len(splits_of(splits, 0)) == 1
    assert len(splits_of(splits, 1)) == 32


def test_keys_below_every_window_are_in_no_split():
    splits = plan_splits([(1000, 1500)], 64, wanted=4)

    assert splits[0].begin == 960
    assert splits[-1].end == 1500


def test_a_long_sequence_at_the_end_of_a_batch_starts_first():
    splits = plan_splits([(0, 1024)] * 40 + [(0, 2000)], 64, wanted=16)

    assert [split.seq for split in splits] == [40, *range(40)]


@pytest.mark.parametrize("programs_per_split", [1, 264, 10_000])
def test_at_least_one_split_is_wanted(programs_per_split):
    assert splits_wanted(132, 2, programs_per_split) == max(1, 264 // programs_per_split)
