"""The life of a step: limits, the token budget, and steps that are scheduled ahead of results."""

from __future__ import annotations

import pytest

from server.engine.core.limits import (
    SchedulerConfig,
)
from server.engine.core.request import (
    FinishReason,
    TokenEvent,
)
from server.engine.core.request_checks import (
    CapacityError,
    DuplicateRequestError,
    EmptyRequestError,
    RefusedError,
)
from server.engine.core.sequence import (
    SequenceStatus,
)
from tests.engine.core.bookkeeping import (
    Token,
    add,
    begin,
    commit,
    finish_everything,
    make_scheduler,
    make_sequence,
    output_of,
    rows_of,
    step,
)

# Limits


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 8, 8), "max_num_seqs is 0; at least 1 is needed"),
        ((4, 3, 8), "max_num_batched_tokens is 3; at least 4 is needed"),
        ((4, 4, 1), "max_model_len is 1; at least 2 is needed"),
    ],
)
def test_limits_that_give_a_sequence_no_token_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(*limits)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "limit"), [(3, 100, 12), (100, 12, 12), (3, 12, 12)]
)
@pytest.mark.parametrize("num_prompt_tokens", [1, 8, 11])
def test_only_a_request_that_can_never_fit_is_refused(
    num_blocks, max_model_len, limit, num_prompt_tokens
):
    scheduler = make_scheduler(num_blocks, 4, max_model_len=max_model_len)
    max_new_tokens = limit - num_prompt_tokens

    add(scheduler, 0, num_prompt_tokens, max_new_tokens)
    with pytest.raises(CapacityError, match="come to 13 tokens; at most 12 fit") as caught:
        scheduler.add(make_sequence(1, num_prompt_tokens, max_new_tokens + 1))

    assert (caught.value.value, caught.value.limit) == (13, limit)
    assert scheduler.max_total_tokens == limit
    assert scheduler.num_waiting == 1
    assert finish_everything(scheduler)[0].finish_reason is FinishReason.LENGTH
    assert scheduler.num_generated_tokens == max_new_tokens


@pytest.mark.parametrize(("prompt", "max_new_tokens"), [([], 4), ([1], 0), ([1], -1)])
def test_a_request_without_a_prompt_or_without_new_tokens_is_refused(prompt, max_new_tokens):
    scheduler = make_scheduler(4)

    with pytest.raises(EmptyRequestError, match=f"got {len(prompt)} and {max_new_tokens}"):
        scheduler.add(make_sequence(0, prompt, max_new_tokens))

    assert not scheduler.has_work


def test_an_id_in_use_is_refused_until_its_sequence_is_finished():
    scheduler = make_scheduler(4)
    add(scheduler, 5, 3, max_new_tokens=1)

    with pytest.raises(DuplicateRequestError, match="request id 5 is in use") as caught:
        scheduler.add(make_sequence(5, 3))

    assert caught.value.request_id == 5
    assert isinstance(caught.value, RefusedError)
    finish_everything(scheduler)
    add(scheduler, 5, 3)


# Token budget


def test_an_idle_scheduler_schedules_nothing():
    scheduler = make_scheduler(4)

    output, events = step(scheduler)

    assert ([*output.decode], output.prefill, output.num_tokens, events) == ([], (), 0, [])


def test_a_prompt_is_computed_at_once_and_then_one_token_per_step():
    scheduler = make_scheduler(8)
    sequence = add(scheduler, 0, 6, max_new_tokens=3)
    rows = []

    while scheduler.has_work:
        output, _ = step(scheduler)
        rows += rows_of(output)

    assert rows == [(0, 0, 6, True), (0, 6, 1, True), (0, 7, 1, True)]
    assert output_of(sequence) == [7, 7, 7]
    assert sequence.status is SequenceStatus.FINISHED


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_sampled_once():
    scheduler = make_scheduler(8, max_num_seqs=1, max_num_batched_tokens=4)
    add(scheduler, 0, 9, max_new_tokens=1)
    outputs = []
    events = []

    while scheduler.has_work:
        output, new = step(scheduler)
        outputs.append(output)
        events += new

    assert [rows_of(output) for output in outputs] == [
        [(0, 0, 4, False)],
        [(0, 4, 4, False)],
        [(0, 8, 1, True)],
    ]
    assert [len(output.decode) for output in outputs] == [0, 0, 1]
    assert [request_id for request_id, _ in events] == [0]


def test_a_step_in_which_nothing_decodes_has_a_larger_budget():
    scheduler = make_scheduler(64, max_num_batched_tokens=8, max_prefill_tokens=20)
    add(scheduler, 0, 30, max_new_tokens=20)
    outputs = [step(scheduler)[0]]
    add(scheduler, 1, 40)

    outputs += [step(scheduler)[0] for _ in range(3)]

    assert [rows_of(output) for output in outputs] == [
        [(0, 0, 20, False)],
        [(0, 20, 10, True), (1, 0, 10, False)],
        [(0, 30, 1, True), (1, 10, 7, False)],
        [(0, 31, 1, True), (1, 17, 7, False)],
    ]


@pytest.mark.parametrize("num_prompt_tokens", [1, 2])
def test_a_row_of_exactly_one_token_is_a_decode_row(num_prompt_tokens):
    scheduler = make_scheduler(8)
    add(scheduler, 0, num_prompt_tokens)

    output = scheduler.schedule()

    assert len(output.decode) == (num_prompt_tokens == 1)
    assert len(output.prefill) == (num_prompt_tokens == 2)


def test_decoding_sequences_come_first_and_a_new_prompt_gets_the_rest_of_the_budget():
    scheduler = make_scheduler(64, max_num_seqs=4, max_num_batched_tokens=8)
    add(scheduler, 0, 3, max_new_tokens=20)
    add(scheduler, 1, 4, max_new_tokens=20)
    step(scheduler)
    add(scheduler, 2, 10)
    add(scheduler, 3, 6)

    outputs = [step(scheduler)[0] for _ in range(3)]

    assert [rows_of(output) for output in outputs] == [
        [(0, 3, 1, True), (1, 4, 1, True), (2, 0, 6, False)],
        [(0, 4, 1, True), (1, 5, 1, True), (2, 6, 4, True), (3, 0, 2, False)],
        [(0, 5, 1, True), (1, 6, 1, True), (2, 10, 1, True), (3, 2, 4, True)],
    ]
    assert [output.num_tokens for output in outputs] == [8, 8, 7]


def test_every_decoding_sequence_gets_a_token_under_the_smallest_budget():
    scheduler = make_scheduler(64, max_num_seqs=4, max_num_batched_tokens=4)
    for request_id in range(4):
        add(scheduler, request_id, 5, max_new_tokens=12)
    longest_wait = dict.fromkeys(range(4), 0)
    last_event = {}

    while scheduler.has_work:
        _, events = step(scheduler)
        for request_id, _ in events:
            gap = scheduler.num_steps - last_event.get(request_id, scheduler.num_steps)
            longest_wait[request_id] = max(longest_wait[request_id], gap)
            last_event[request_id] = scheduler.num_steps

    assert set(longest_wait.values()) == {1}


def test_at_most_max_num_seqs_sequences_run():
    scheduler = make_scheduler(64, max_num_seqs=2)
    for request_id in range(3):
        add(scheduler, request_id, 3, max_new_tokens=2)

    first, _ = step(scheduler)
    second, _ = step(scheduler)
    third, _ = step(scheduler)

    assert [row[0] for row in rows_of(first)] == [0, 1]
    assert [row[0] for row in rows_of(second)] == [0, 1]
    assert [row[0] for row in rows_of(third)] == [2]


def test_a_sequence_is_reported_as_first_scheduled_once():
    scheduler = make_scheduler(64, max_num_seqs=1)
    first, second = add(scheduler, 0, 3, max_new_tokens=2), add(scheduler, 1, 3)
    assert first.first_scheduled_step is None

    outputs = [step(scheduler)[0] for _ in range(3)]

    assert [output.first_scheduled for output in outputs] == [(first,), (), (second,)]
    assert [output.step for output in outputs] == [0, 1, 2]
    assert (first.first_scheduled_step, second.first_scheduled_step) == (0, 2)


# Running one step ahead


def test_the_next_step_can_be_scheduled_before_the_tokens_of_the_last_are_known():
    scheduler = make_scheduler(16, 4)
    sequence = add(scheduler, 0, 3, max_new_tokens=5)
    first = begin(scheduler)
    assert (sequence.num_tokens, sequence.num_known_tokens) == (3, 4)

    second = begin(scheduler)

    assert rows_of(second) == [(0, 3, 1, True)]
    scheduler.check_invariants()
    assert commit(scheduler, first, [[Token(20)]]) == [(0, TokenEvent(token_id=20))]
    assert commit(scheduler, second, [[Token(21)]]) == [(0, TokenEvent(token_id=21))]
    assert sequence.token_ids[3:] == [20, 21]
    scheduler.check_invariants()


def test_a_sequence_whose_last_token_is_in_flight_is_not_scheduled_again():
    scheduler = make_scheduler(16, 4)
    add(scheduler, 0, 3, max_new_tokens=1)
    first = begin(scheduler)

    second = scheduler.schedule()

    assert second.num_tokens == 0
    assert scheduler.has_work
    [(_, event)] = commit(scheduler, first, [[Token(20)]])
    assert event.finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work


def test_the_result_of_a_sequence_that_ended_one_step_earlier_is_ignored():
    scheduler = make_scheduler(16, 4)
    ended = add(scheduler, 0, 3, eos_token_ids=(0,))
    other = add(scheduler, 1, 3)
    first = begin(scheduler)
    second = begin(scheduler)

    commit(scheduler, first, [[Token(0)], [Token(20)]])
    assert ended.finish_reason is FinishReason.EOS
    assert not ended.block_table
    events = commit(scheduler, second, [[Token(30)], [Token(21)]])

    assert events == [(1, TokenEvent(token_id=21))]
    assert output_of(ended) == [0]
    assert output_of(other) == [20, 21]
    scheduler.check_invariants()


@pytest.mark.parametrize(("token_id", "reason"), [(22, None), (0, FinishReason.EOS)])
def test_a_preempted_sequence_still_gets_its_token_in_flight(token_id, reason):
    scheduler = make_scheduler(5, 2, max_num_seqs=2)
    add(scheduler, 0, 3, max_new_tokens=5)
    younger = add(scheduler, 1, 2, max_new_tokens=5, eos_token_ids=(0,))
    step(scheduler, 20)
    step(scheduler, 20)
    first = begin(scheduler)

    second = begin(scheduler)

    assert second.preempted == (1,)
    assert younger.num_tokens_in_flight == 1
    scheduler.check_invariants()
    events = dict(commit(scheduler, first, [[Token(21)], [Token(token_id)]]))
    assert events[1] == TokenEvent(token_id=token_id, finish_reason=reason, usage=younger.usage)
    assert output_of(younger) == [20, 20, token_id]
    assert scheduler.num_waiting == (reason is None)
    scheduler.check_invariants()
    commit(scheduler, second, [[Token(23)]])
    finish_everything(scheduler)


def test_a_sequence_that_a_discarded_schedule_preempted_waits_for_its_token_in_flight():
    scheduler = make_scheduler(5, 2, max_num_seqs=2)
    add(scheduler, 0, 3, max_new_tokens=5)
    younger = add(scheduler, 1, 2, max_new_tokens=5)
    step(scheduler, 20)
    step(scheduler, 20)
    first = begin(scheduler)
    assert scheduler.schedule().preempted == (1,)
    scheduler.abort(0)  # now its blocks are free

    second = begin(scheduler)

    assert second.num_tokens == 0
    commit(scheduler, first, [[Token(21)], [Token(22)]])
    commit(scheduler, second, [])
    assert rows_of(begin(scheduler)) == [(1, 2, 3, 1)]
    assert output_of(younger) == [20, 20, 22]


def test_steps_end_in_the_order_in_which_they_were_started():
    scheduler = make_scheduler(16, 4)
    add(scheduler, 0, 3)
    begin(scheduler)
    second = begin(scheduler)

    with pytest.raises(AssertionError, match="in the order"):
        commit(scheduler, second, [[Token(21)]])


def test_a_failed_step_ends_its_sequences_after_the_results_of_the_previous_step():
    scheduler = make_scheduler(16, 4)
    sequence = add(scheduler, 0, 3)
    first = begin(scheduler)
    second = begin(scheduler)

    events = commit(scheduler, first, [[Token(20)]]) + list(scheduler.fail(second, "out of memory"))

    assert [event.token_id for _, event in events] == [20, None]
    assert sequence.error == "out of memory"
    assert scheduler.block_manager.num_free_blocks == 16
    scheduler.check_invariants()


# Figures of the load


def test_the_rest_of_a_prompt_that_got_a_single_token_counts_as_queued():
    scheduler = make_scheduler(num_blocks=100, max_num_seqs=4, max_num_batched_tokens=4)
    add(scheduler, 1, 64)
    step(scheduler)
    add(scheduler, 2, 20)
    output, _ = step(scheduler)

    assert rows_of(output) == [(2, 0, 1, 0), (1, 4, 3, 0)]
    assert scheduler.num_prefill_tokens == 19 + 57


def test_generated_tokens_count_in_their_rate_only_while_sequences_wait_for_a_place():
    scheduler = make_scheduler(num_blocks=100, max_num_seqs=2)
    for i in range(2):
        add(scheduler, i, 4, 20)
    for _ in range(3):
        output = scheduler.schedule()
        scheduler.start(output)
        commit(scheduler, output, [[Token(7)]] * 2, 9.0)
    assert scheduler.output_rate.value == 0.0
    add(scheduler, 2, 4, 20)
    for _ in range(3):
        output = scheduler.schedule()
        scheduler.start(output)
        commit(scheduler, output, [[Token(7)]] * 2, 0.5)

    assert scheduler.output_rate.value == pytest.approx(2 / 0.5)


def test_waiting_sequences_are_expected_to_generate_what_others_with_such_a_limit_did():
    scheduler = make_scheduler(num_blocks=100, max_num_seqs=1)
    for i in range(3):
        add(scheduler, i, 4, 20)
    assert sum(scheduler.waiting.by_length.output) == 60
    output = scheduler.schedule()
    scheduler.start(output)
    scheduler.abort(0)
    commit(scheduler, output, [[Token(7)]], 0.5)
    scheduler.abort(1)
    scheduler.abort(2)
    add(scheduler, 3, 4, 20)
    add(scheduler, 4, 4, 200)

    assert sum(scheduler.waiting.by_length.output) == 1 + 200


def test_what_is_left_in_an_idle_scheduler_is_named_with_its_number():
    scheduler = make_scheduler(8, 4, max_num_seqs=2)
    assert scheduler.idle_violations() == []
    for request_id in range(3):
        add(scheduler, request_id, 3, max_new_tokens=5)
    begin(scheduler)

    found = scheduler.idle_violations()

    assert found[:5] == [
        "1 waiting sequences, expected none",
        "2 running sequences, expected none",
        "3 unfinished sequences, expected none",
        "1 started steps, expected none",
        "16 reserved tokens, expected none",
    ]
    assert found[5:] == scheduler.block_manager.idle_violations() != []
