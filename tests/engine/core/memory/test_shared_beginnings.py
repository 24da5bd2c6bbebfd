"""The beginnings that waiting prompts share, and who waits for one that is being computed."""

import pytest

from server.engine.core.memory.shared_beginnings import SharedBeginnings
from tests.engine.core.bookkeeping import (
    add,
    begin,
    finish_everything,
    make_scheduler,
    make_sequence,
    rows_of,
    step,
)

COMMON = list(range(100, 140))


def index_of(*prompts, unit=4, **options):
    index = SharedBeginnings(unit)
    sequences = [make_sequence(i, it, **options) for i, it in enumerate(prompts)]
    for it in sequences:
        index.add(it)
    index.check_invariants(sequences)
    return index, sequences


@pytest.mark.parametrize(
    ("other", "start", "expected"),
    [
        ([*COMMON, 1, 1, 1], 0, [40]),
        ([*COMMON[:39], 1, 1, 1], 0, [36]),
        ([*COMMON[:39], 1, 1, 1], 32, [36]),
        ([*COMMON[:39], 1, 1, 1], 36, []),
        (COMMON[:13], 0, [12]),
        (COMMON[:12], 0, [8]),
        (COMMON[:4], 0, []),
        ([1, *COMMON], 0, []),
    ],
)
def test_a_prompt_is_cut_where_another_one_parts_from_it(other, start, expected):
    index, (sequence, _) = index_of([*COMMON, 2, 2, 2], other)

    assert index.partings(sequence, start) == expected


def test_of_many_places_those_count_that_save_most():
    prompts = [[*COMMON[: 4 * n], 1, 1, 1, 1, 1] for n in (2, 5, 5, 5, 6, 7, 8, 8)]
    index, (sequence, *_) = index_of(COMMON, *prompts)

    assert index.partings(sequence, 0) == [32, 20, 28, 24]
    assert len(index.partings(sequence, 4)) == 4


def test_prompts_of_other_salts_share_nothing():
    index, (sequence,) = index_of(COMMON)
    index.add(make_sequence(7, COMMON, salt="a"))

    assert index.partings(sequence, 0) == []


def test_sequences_that_left_are_not_compared():
    index, (first, second) = index_of(COMMON, COMMON)
    index.remove(second)
    index.remove(second)

    assert index.partings(first, 0) == []
    index.check_invariants([first])


def scheduler(**changes):
    return make_scheduler(200, num_slots=20, **({"max_num_batched_tokens": 200} | changes))


@pytest.mark.parametrize("keeps_inside", [False, True], ids=["cut", "kept inside"])
def test_of_prompts_that_wait_together_all_but_the_first_begin_where_they_part(keeps_inside):
    it = scheduler(keeps_inside=keeps_inside)
    sequences = [add(it, i, [*COMMON, i, i, i, i, i]) for i in range(6)]
    unrelated = add(it, 9, 60)

    first = rows_of(begin_and_commit(it))

    assert [row[0] for row in first] == [0]
    finish_everything(it)
    assert [s.num_cached_tokens for s in sequences] == [0, *[40] * 5]
    assert unrelated.num_cached_tokens == 0
    assert it.idle_violations() == []


def begin_and_commit(it):
    output, _ = step(it)
    return output


def test_a_short_prompt_with_another_beginning_does_not_wait():
    it = scheduler()
    add(it, 0, [*COMMON, 1, 1, 1])
    held = add(it, 1, [*COMMON, 2, 2, 2])
    other = add(it, 2, 12)

    served = {row[0] for row in rows_of(begin(it))}

    assert served == {0, other.request_id}
    assert held.num_computed_tokens == 0


def test_a_prompt_does_not_wait_to_save_less_than_a_quarter():
    it = scheduler()
    add(it, 0, [*COMMON[:8], *[1] * 40])
    add(it, 1, [*COMMON[:8], *[2] * 40])

    assert {row[0] for row in rows_of(begin(it))} == {0, 1}


def test_a_prompt_waits_no_more_once_the_other_one_was_cancelled():
    it = scheduler()
    add(it, 0, [*COMMON, 1, 1, 1])
    add(it, 1, [*COMMON, 2, 2, 2])
    it.start(output := it.schedule())
    assert [row[0] for row in rows_of(output)] == [0]

    it.abort(0)

    assert [row[0] for row in rows_of(it.schedule())] == [1]
