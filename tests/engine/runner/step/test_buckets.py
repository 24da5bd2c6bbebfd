"""The grid of buckets: what is recorded ahead, and which buckets a step fits in."""

import itertools

import msgspec
import pytest

from model.executors.columns import Bucket
from server.engine.core.limits import SchedulerConfig
from server.engine.runner.step.buckets import BucketGrid, row_counts, shared_count, token_counts

S = 8


def grid(**changes):
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 1600} | changes
    return BucketGrid(SchedulerConfig(**limits), S)


def bucket(rows=0, prompt_tokens=0, prompt_seqs=0, columns=64, most=256, shared=0):
    return Bucket(
        rows=rows,
        prompt_tokens=prompt_tokens,
        prompt_seqs=prompt_seqs,
        columns=columns,
        num_logits=min(rows + prompt_seqs, most),
        shared_blocks=shared,
    )


def own(buckets, step):
    return next(iter(buckets.fitting(step)))


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (20, [1, 2, 4, 8, 16, 20]),
        (200, [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 200]),
    ],
)
def test_row_counts_leave_few_rows_unused(most, expected):
    assert row_counts(most) == expected


def test_token_counts_leave_at_most_a_fifth_unused():
    counts = token_counts(8192)

    assert counts[:8] == [16, 20, 24, 28, 32, 40, 48, 56]
    assert counts[-3:] == [6144, 7168, 8192]
    assert all(larger <= 1.25 * smaller for smaller, larger in itertools.pairwise(counts))
    assert token_counts(100)[-2:] == [96, 100]
    assert token_counts(3) == [3]


def test_token_counts_of_mixed_buckets_have_two_parts_per_power_of_two():
    assert token_counts(1000, 128, 2) == [128, 192, 256, 384, 512, 768, 1000]
    assert token_counts(128, 128, 2) == [128]
    assert token_counts(40, 128, 2) == [40]


def test_decode_rows_use_longer_tables_beyond_the_capacity_of_shorter_ones():
    buckets = grid(max_num_seqs=4, max_num_batched_tokens=64)

    def columns(blocks):
        return own(buckets, bucket(3, columns=blocks)).columns

    assert columns(1) == columns(64) == 64
    assert columns(65) == columns(128) == 128
    assert columns(129) == columns(200) == 200
    assert own(buckets, bucket(3)) == bucket(4)


def test_prompts_use_the_smallest_bucket_that_they_fit_in():
    buckets = grid(max_num_seqs=64, max_num_batched_tokens=512)

    def found(tokens, seqs=1, columns=1):
        return own(buckets, bucket(0, tokens, seqs, columns))

    assert found(2) == bucket(0, 16, 1)
    assert found(129) == bucket(0, 160, 1)
    assert found(100, columns=64) == bucket(0, 112, 1)
    assert found(100, columns=65) == bucket(0, 112, 1, 200)
    assert found(30, 2) == bucket(0, 32, 8)
    assert found(18, 9) == bucket(0, 20, 64)


def test_mixed_steps_use_the_smallest_bucket_that_they_fit_in():
    buckets = grid()

    def fitting(rows, tokens, seqs=1, columns=1):
        return list(buckets.fitting(bucket(rows, tokens, seqs, columns)))

    assert fitting(1, 2)[0] == bucket(16, 128, 32)
    assert fitting(17, 128)[0] == bucket(64, 128, 32)
    assert fitting(65, 200, 2)[0] == bucket(256, 256, 32)
    assert fitting(64, 9, columns=65) == [
        bucket(64, 128, 32, 200),
        bucket(256, 128, 32, 200),
        bucket(64, 128, 256, 200),
        bucket(256, 128, 256, 200),
    ]
    assert fitting(200, 400, seqs=33)[0] == bucket(256, 512, 256)
    assert fitting(1, 600, seqs=33) == []


def test_buckets_to_record_ahead_are_few_and_ordered_by_need():
    ahead = list(grid().ahead())

    prompts = [it for it in ahead if it.prompt_seqs]
    mixed = [it for it in prompts if it.rows]
    assert [it.prompt_seqs for it in ahead] == sorted((it.prompt_seqs for it in ahead), key=bool)
    order = [(it.columns, bool(it.rows)) for it in prompts]
    assert order == sorted(order)
    assert mixed[:4] == [
        bucket(256, 128, 32),
        bucket(64, 128, 32),
        bucket(16, 128, 32),
        bucket(256, 192, 32),
    ]
    assert sorted({it.prompt_tokens for it in mixed}) == [
        128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    ]  # fmt: skip
    assert len(mixed) == (9 + 5) * 3 * 2
    assert {it.prompt_tokens for it in mixed if it.prompt_seqs > 32} == {128, 192, 256, 384, 512}
    assert prompts[0] == bucket(0, 16, 1)
    assert len(set(ahead)) == len(ahead)


@pytest.mark.parametrize(
    ("most", "rows"), [(1, set()), (2, {2}), (16, {16}), (20, {16, 20}), (96, {16, 64, 96})]
)
def test_buckets_have_no_more_decode_rows_than_a_step(most, rows):
    ahead = list(grid(max_num_seqs=most, max_num_batched_tokens=96).ahead())

    mixed = [it for it in ahead if it.prompt_seqs and it.rows]
    assert {it.rows for it in mixed} == rows
    assert {it.prompt_seqs for it in mixed} <= {min(32, most), most}
    assert all(it.num_logits <= most for it in ahead)


def test_a_step_does_not_fit_in_a_bucket_with_fewer_rows_of_logits():
    verifying = msgspec.structs.replace(bucket(0, 9, 1), num_logits=9)

    assert all(it.num_logits >= 9 for it in grid().fitting(verifying))
    assert own(grid(), verifying) == bucket(0, 16, 256)


def test_a_step_with_a_shared_prefix_prefers_buckets_that_read_it_once():
    found = list(grid().fitting(bucket(3, shared=21)))

    once = [it for it in found if it.shared_blocks]
    assert found[0] == msgspec.structs.replace(bucket(4), shared_blocks=20)
    assert {it.shared_blocks for it in once} == {20}
    assert found == [*once, *(msgspec.structs.replace(it, shared_blocks=0) for it in once)]


def test_at_least_four_fifths_of_the_shared_blocks_are_read_once():
    counts = [shared_count(blocks) for blocks in range(2000)]

    assert counts[:4] == [0] * 4
    assert counts[4:17] == [4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 16]
    assert all(count % 4 == 0 for count in counts)
    assert all(count <= blocks < 1.25 * count for blocks, count in enumerate(counts) if blocks > 15)
    assert len(set(counts)) < 35


@pytest.mark.parametrize(
    ("queries", "most", "expected"), [(2, 8, 2), (3, 8, 4), (5, 8, 8), (5, 6, 6), (5, 1, 5)]
)
def test_rows_with_drafts_fit_buckets_of_few_numbers_of_tokens(queries, most, expected):
    buckets = grid(max_num_seqs=16, max_queries=most)
    step = Bucket(rows=3, queries=queries, columns=9, num_logits=3 * queries)

    first, *others = buckets.fitting(step)

    assert (first.rows, first.queries, first.num_logits) == (
        4,
        expected,
        min(4 * expected, 16 * most),
    )
    assert all(it.queries == expected and it.num_logits >= 3 * queries for it in others)
    assert all(it.queries == 1 for it in buckets.ahead())
    mixed = msgspec.structs.replace(step, prompt_tokens=5, prompt_seqs=1)
    assert not list(buckets.fitting(mixed))


def test_a_step_with_more_logits_than_there_is_memory_for_fits_no_bucket():
    step = Bucket(rows=16, queries=4, columns=9, num_logits=64)

    assert not list(grid(max_num_seqs=16).fitting(step))
    assert list(grid(max_num_seqs=16, max_queries=8).fitting(step))


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, [1]), (3, [1, 2, 4]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])],
)
def test_steps_of_few_rows_have_the_sizes_whose_bits_are_equal(most, expected):
    assert row_counts(most, 8) == expected


@pytest.mark.parametrize("most", range(1, 12))
def test_steps_of_few_rows_use_no_larger_recording(most):
    buckets = BucketGrid(SchedulerConfig(most, 64, 4096, exact_rows=8), 16)
    for made in buckets.ahead():
        if not made.prompt_seqs:
            assert made in buckets.fitting(made)
    for rows in range(1, min(most, 8) + 1):
        step = Bucket(rows=rows, columns=3, num_logits=rows)
        found = {it.rows for it in buckets.fitting(step)}
        assert max(found) <= 8
        assert found <= {1, 2, 4, 8}
        chained = list(buckets.fitting(msgspec.structs.replace(step, chained=True)))
        assert {it.rows for it in chained} == {1 << (rows - 1).bit_length()}
        assert all(it.chained for it in chained)
