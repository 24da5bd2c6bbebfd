"""Which waiting sequences are admitted, and what they find in the prefix cache."""

from __future__ import annotations

import pytest

from tests.engine.core.bookkeeping import (
    add,
    finish_everything,
    make_scheduler,
    rows_of,
    step,
)

# Admission


def test_a_shorter_prompt_is_admitted_while_an_older_one_does_not_fit_yet():
    scheduler = make_scheduler(4, 4)
    add(scheduler, 0, 7, max_new_tokens=2)
    add(scheduler, 1, 11, max_new_tokens=1)
    add(scheduler, 2, 1, max_new_tokens=1)
    add(scheduler, 3, 12, max_new_tokens=1)

    output, _ = step(scheduler)

    assert {row[0] for row in rows_of(output)} == {0, 2}
    assert scheduler.num_waiting == 2


def decoding(num_blocks, *, max_new_tokens=8, **config):
    """Return a scheduler with one running sequence, id 0, which holds two blocks of four tokens and decodes."""
    scheduler = make_scheduler(num_blocks, 4, **config)
    add(scheduler, 0, 6, max_new_tokens)
    step(scheduler)
    return scheduler


def test_beside_sequences_that_decode_a_shorter_prompt_is_admitted_if_the_first_does_not_fit():
    scheduler = decoding(5)
    add(scheduler, 1, 11, max_new_tokens=1)
    add(scheduler, 2, 5, max_new_tokens=1)
    add(scheduler, 3, 12, max_new_tokens=1)

    output, _ = step(scheduler)

    assert rows_of(output) == [(0, 6, 1, 1), (2, 0, 5, 1)]
    assert scheduler.admission.is_short_of_places
    assert [s.request_id for s in output.first_scheduled] == [2]
    assert [s.request_id for s in scheduler._live.waiting] == [1, 3]


def test_the_first_is_admitted_before_a_shorter_one_where_both_fit_one_after_the_other():
    scheduler = decoding(6)
    add(scheduler, 1, 11, max_new_tokens=1)
    add(scheduler, 2, 9, max_new_tokens=1)

    output, _ = step(scheduler)

    assert rows_of(output) == [(0, 6, 1, 1), (1, 0, 11, 1)]


def test_nothing_is_admitted_if_neither_the_first_nor_the_shortest_fits():
    scheduler = decoding(4)
    add(scheduler, 1, 15, max_new_tokens=1)
    add(scheduler, 2, 9, max_new_tokens=1)
    add(scheduler, 3, 11, max_new_tokens=1)

    output, _ = step(scheduler)

    assert rows_of(output) == [(0, 6, 1, 1)]
    assert scheduler.num_waiting == 3
    assert scheduler.num_free_places == 0


def test_a_shorter_prompt_does_not_pass_one_that_has_waited_its_share():
    """What overtakes the first has at most as many tokens as it or as a step; then the blocks stay free for it."""
    scheduler = decoding(8, max_new_tokens=26, max_num_batched_tokens=8, max_num_seqs=8)
    add(scheduler, 1, 25, max_new_tokens=1)
    passed = []
    for request_id in range(2, 12):
        add(scheduler, request_id, 5, max_new_tokens=1)
        output, _ = step(scheduler)
        passed += [s.request_id for s in output.first_scheduled]

    assert passed == [2, 3, 4, 5, 6]


def test_no_place_among_the_running_sequences_is_no_reason_to_try_a_shorter_prompt_twice():
    scheduler = decoding(16, max_num_seqs=1)
    add(scheduler, 1, 3, max_new_tokens=1)

    output, _ = step(scheduler)

    assert rows_of(output) == [(0, 6, 1, 1)]
    assert scheduler.admission.is_short_of_places
    finish_everything(scheduler)
    assert not scheduler.admission.is_short_of_places


@pytest.mark.parametrize(("num_blocks", "num_running"), [(3, 1), (4, 2), (5, 2)])
def test_two_sequences_run_together_only_if_their_known_tokens_fit(num_blocks, num_running):
    scheduler = make_scheduler(num_blocks, 4)
    add(scheduler, 0, 6, max_new_tokens=3)
    add(scheduler, 1, 6, max_new_tokens=3)

    step(scheduler)

    assert scheduler.num_running == num_running


@pytest.mark.parametrize(
    ("max_new_tokens", "num_running"),
    [
        pytest.param(3, 2, id="its last token needs no slot"),
        pytest.param(4, 1, id="its last but one token needs a new block"),
    ],
)
def test_a_block_stays_free_for_each_running_sequence_that_may_grow(max_new_tokens, num_running):
    scheduler = make_scheduler(4, 4)
    add(scheduler, 0, 6, max_new_tokens)
    add(scheduler, 1, 6, max_new_tokens=1)

    output, _ = step(scheduler)

    assert len(rows_of(output)) == num_running


def test_all_blocks_of_a_prompt_are_allocated_with_its_first_chunk():
    scheduler = make_scheduler(8, 4, max_num_seqs=2, max_num_batched_tokens=4)
    sequence = add(scheduler, 0, 14)

    step(scheduler)

    assert sequence.num_computed_tokens == 4
    assert len(sequence.block_table) == 4


# Prefix cache


def test_a_cached_prefix_is_not_computed_again():
    scheduler = make_scheduler(32, 4)
    prompt = list(range(50, 60))
    add(scheduler, 0, prompt, max_new_tokens=1)
    step(scheduler)
    sequence = add(scheduler, 1, [*prompt, 1, 2])

    output, _ = step(scheduler)

    assert rows_of(output) == [(1, 8, 4, True)]
    assert sequence.num_cached_tokens == 8
    assert scheduler.admission.prefix_cache_query_tokens == 10 + 12
    assert scheduler.admission.prefix_cache_hit_tokens == 8
    assert scheduler.admission.num_prompt_tokens == 10 + 12


def test_a_prompt_that_is_cached_in_full_still_computes_its_last_block():
    scheduler = make_scheduler(32, 4)
    add(scheduler, 0, range(50, 58), max_new_tokens=1)
    step(scheduler)
    add(scheduler, 1, range(50, 58))

    output, events = step(scheduler)

    assert rows_of(output) == [(1, 4, 4, True)]
    assert [request_id for request_id, _ in events] == [1]


def test_a_cached_prefix_that_leaves_one_token_makes_a_decode_row():
    scheduler = make_scheduler(32, 4)
    add(scheduler, 0, range(50, 58), max_new_tokens=1)
    step(scheduler)
    add(scheduler, 1, range(50, 59))

    output, _ = step(scheduler)

    assert [row.start for row in output.decode] == [8]
    assert output.prefill == ()


def test_a_prompt_with_prompt_logprobs_is_not_looked_up_or_counted():
    scheduler = make_scheduler(32, 4)
    add(scheduler, 0, range(50, 60), max_new_tokens=1)
    step(scheduler)
    add(scheduler, 1, range(50, 60), prompt_logprobs=True)

    output, _ = step(scheduler)

    assert rows_of(output) == [(1, 0, 10, True)]
    assert scheduler.admission.prefix_cache_query_tokens == 10


def test_the_next_prompt_of_a_conversation_finds_the_cached_output_of_the_last():
    scheduler = make_scheduler(32, 4)
    first = add(scheduler, 0, range(50, 55), max_new_tokens=8)
    finish_everything(scheduler)
    second = add(scheduler, 1, [*first.token_ids, 90, 91])

    step(scheduler)

    assert second.num_cached_tokens == 12  # 13 tokens known, the last one never computed


@pytest.mark.parametrize("token_id", [0, 1, 2])
def test_the_blocks_of_a_sequence_stay_cached_however_it_ended(token_id):
    scheduler = make_scheduler(32, 4)
    add(scheduler, 0, range(50, 56), max_new_tokens=1, eos_token_ids=(0,), stop_token_ids=(1,))
    step(scheduler, token_id)
    add(scheduler, 1, range(70, 76))
    step(scheduler)
    scheduler.abort(1)

    sequences = [add(scheduler, 2, range(50, 56)), add(scheduler, 3, range(70, 76))]
    step(scheduler)

    assert [sequence.num_cached_tokens for sequence in sequences] == [4, 4]
