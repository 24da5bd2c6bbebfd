from __future__ import annotations

import msgspec
import pytest

from server.engine.core.limits import SchedulerConfig
from server.engine.core.request import FinishReason, TokenEvent
from server.engine.core.request_checks import (
    CapacityError,
    DuplicateRequestError,
    EmptyRequestError,
    RefusedError,
)
from server.engine.core.sequence import SequenceStatus
from server.engine.core.step import DecodeRows
from tests.engine.core.bookkeeping import (
    Token,
    begin,
    commit,
    make_scheduler,
    make_sequence,
    rows_of,
    step,
)


def add(scheduler, request_id, prompt, max_new_tokens=4, **sampling):
    sequence = make_sequence(request_id, prompt, max_new_tokens, **sampling)
    scheduler.add(sequence)
    scheduler.check_invariants()
    return sequence


def finish_everything(scheduler):
    """Run steps until no sequence is left; return the last event of every request."""
    last = {}
    while scheduler.has_work:
        _, events = step(scheduler)
        last.update(events)
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
    return last


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
    assert sequence.output_token_ids == [7, 7, 7]
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


# Preemption


def start_two_that_collide():
    """Start A, which needs its third block in step 7, and B, which then has computed 6 of its 8 tokens."""
    scheduler = make_scheduler(5, 4, max_num_seqs=2, max_num_batched_tokens=2)
    older = add(scheduler, 0, 3, max_new_tokens=12)
    younger = add(scheduler, 1, 8, max_new_tokens=4)
    for _ in range(7):
        output, _ = step(scheduler)
        assert output.preempted == ()
    assert (older.num_computed_tokens, younger.num_computed_tokens) == (8, 6)
    assert scheduler.block_manager.num_free_blocks == 0
    return scheduler, older, younger


def test_an_older_sequence_takes_the_blocks_of_the_youngest():
    scheduler, older, younger = start_two_that_collide()

    output, _ = step(scheduler)

    assert output.preempted == (1,)
    assert rows_of(output) == [(0, 8, 1, True)]
    assert (older.num_preemptions, younger.num_preemptions) == (0, 1)
    assert (younger.status, younger.num_computed_tokens) == (SequenceStatus.WAITING, 0)
    assert younger.block_table == []
    assert scheduler.num_preemptions == 1


def test_a_preempted_sequence_resumes_where_its_cached_blocks_end():
    scheduler, older, younger = start_two_that_collide()
    while older.status is SequenceStatus.RUNNING:
        output, _ = step(scheduler)
        assert [row[0] for row in rows_of(output)] == [0]

    output, _ = step(scheduler)

    assert rows_of(output) == [(1, 4, 2, False)]
    assert output.first_scheduled == ()
    assert (younger.num_cached_tokens, younger.first_scheduled_step) == (0, 1)
    finish_everything(scheduler)
    assert scheduler.admission.num_prompt_tokens == 3 + 8


def test_the_youngest_sequence_is_preempted_itself_if_it_needs_the_block():
    scheduler = make_scheduler(3, 4)
    add(scheduler, 0, 3, max_new_tokens=9)
    step(scheduler)
    younger = add(scheduler, 1, 3, max_new_tokens=9)
    step(scheduler)
    step(scheduler)
    assert scheduler.num_running == 2

    output, _ = step(scheduler)

    assert output.preempted == (1,)
    assert [row[0] for row in rows_of(output)] == [0]
    assert younger.num_output_tokens == 2


def test_a_preempted_sequence_keeps_its_output_and_finishes_normally():
    scheduler = make_scheduler(3, 4)
    sequences = [add(scheduler, request_id, 3, max_new_tokens=9) for request_id in range(3)]
    tokens = {request_id: [] for request_id in range(3)}
    token_id = 100

    while scheduler.has_work:
        token_id += 1
        _, events = step(scheduler, token_id)
        for request_id, event in events:
            tokens[request_id].append(event.token_id)

    assert scheduler.num_preemptions > 0
    assert [sequence.output_token_ids for sequence in sequences] == list(tokens.values())
    assert all(len(output) == 9 for output in tokens.values())
    assert scheduler.num_generated_tokens == 27


def test_tokens_recomputed_after_a_preemption_do_not_count_as_prompt_tokens():
    scheduler = make_scheduler(3, 4, enable_prefix_caching=False)
    for request_id in range(2):
        add(scheduler, request_id, 3, max_new_tokens=9)

    finish_everything(scheduler)

    assert scheduler.num_preemptions == 1
    assert scheduler.admission.num_prompt_tokens == 3 + 3


def test_preempted_sequences_wait_in_order_of_arrival_before_all_others(monkeypatch):
    scheduler = make_scheduler(32, 4, max_num_seqs=3)
    for request_id in range(4):
        add(scheduler, request_id, 3)
    step(scheduler)
    answers = iter([False, False])
    grow = scheduler.block_manager.grow
    monkeypatch.setattr(
        scheduler.block_manager, "grow", lambda *args: next(answers, True) and grow(*args)
    )
    step(scheduler)

    preempting, _ = step(scheduler)
    resuming, _ = step(scheduler)

    assert preempting.preempted == (2, 1)
    assert [row[0] for row in rows_of(preempting)] == [0]
    assert [row[0] for row in rows_of(resuming)] == [0, 1, 2]


def test_a_step_that_preempts_admits_no_sequence():
    scheduler, _, _ = start_two_that_collide()
    add(scheduler, 2, 1, max_new_tokens=1)

    output, _ = step(scheduler)

    assert output.preempted == (1,)
    assert len(rows_of(output)) == 1
    assert scheduler.num_waiting == 2


def test_a_preempted_sequence_is_not_overtaken_and_waits_until_its_context_fits():
    scheduler, older, younger = start_two_that_collide()
    small = add(scheduler, 2, 1, max_new_tokens=1)

    while older.status is SequenceStatus.RUNNING:
        step(scheduler)
        assert younger.status is small.status is SequenceStatus.WAITING

    step(scheduler)
    assert younger.status is SequenceStatus.RUNNING


# Abort


def test_waiting_sequences_with_a_lower_priority_number_are_served_first():
    scheduler = make_scheduler(num_blocks=32, max_num_seqs=1)
    for request_id, priority in ((0, 0), (1, 5), (2, -1), (3, 0), (4, -1)):
        scheduler.add(make_sequence(request_id, 3, max_new_tokens=1, priority=priority))

    order = [rows_of(step(scheduler)[0])[0][0] for _ in range(5)]

    assert order == [2, 4, 0, 3, 1]


def test_the_sequence_with_the_highest_priority_number_is_preempted_first():
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    low = make_sequence(0, 3, max_new_tokens=6, priority=9)
    scheduler.add(low)
    step(scheduler)
    for request_id in (1, 2):
        scheduler.add(make_sequence(request_id, 3, max_new_tokens=6))
    preempted = []
    for _ in range(4):
        output, _ = step(scheduler)
        preempted += output.preempted

    assert preempted[0] == 0
    assert low.output_token_ids


def test_a_long_prompt_of_high_priority_leaves_a_token_to_every_running_sequence():
    scheduler = make_scheduler(num_blocks=32, max_num_seqs=4, max_num_batched_tokens=8)
    for request_id in (0, 1, 2):
        scheduler.add(make_sequence(request_id, 2, max_new_tokens=20))
    step(scheduler)
    scheduler.add(make_sequence(3, 30, max_new_tokens=20, priority=-1))

    outputs = [step(scheduler)[0] for _ in range(3)]

    for output in outputs:
        assert [row[0] for row in rows_of(output)] == [0, 1, 2, 3]
        assert output.num_tokens == 8


def test_a_waiting_sequence_does_not_preempt_a_running_one_of_lower_priority():
    scheduler = make_scheduler(num_blocks=32, max_num_seqs=1)
    scheduler.add(make_sequence(0, 3, max_new_tokens=4, priority=1))
    step(scheduler)
    scheduler.add(make_sequence(1, 3, max_new_tokens=1))

    served = [rows_of(step(scheduler)[0])[0][0] for _ in range(4)]

    assert served == [0, 0, 0, 1]


def test_sequences_with_different_salts_share_no_cached_blocks():
    scheduler = make_scheduler(num_blocks=32, block_size=4)
    prompt = list(range(12))
    cached = []
    for request_id, salt in enumerate((None, "a", "b", "a", None)):
        sequence = make_sequence(request_id, prompt, max_new_tokens=1, salt=salt)
        scheduler.add(sequence)
        step(scheduler)
        cached.append(sequence.num_cached_tokens)

    assert cached == [0, 0, 0, 8, 8]


def test_a_sequence_that_expires_without_output_ends_at_once():
    scheduler = make_scheduler(num_blocks=32, max_num_batched_tokens=8)
    scheduler.add(make_sequence(0, 20))
    step(scheduler)

    event = scheduler.expire(0)

    assert (event.token_id, event.finish_reason) == (None, FinishReason.TIMEOUT)
    assert not scheduler.has_work
    assert scheduler.block_manager.num_free_blocks == 32


def test_a_sequence_that_expires_with_output_ends_with_its_next_token():
    scheduler = make_scheduler(num_blocks=32)
    scheduler.add(make_sequence(0, 3, max_new_tokens=9))
    step(scheduler)

    assert scheduler.expire(0) is None
    _, [(_, event)] = step(scheduler)

    assert (event.token_id, event.finish_reason) == (7, FinishReason.TIMEOUT)
    assert not scheduler.has_work


def test_an_expired_sequence_that_is_preempted_ends_without_a_token():
    scheduler = make_scheduler(5, block_size=4)
    for request_id in (0, 1):
        add(scheduler, request_id, 4, max_new_tokens=12)
    for _ in range(5):  # until both have filled two of the five blocks
        step(scheduler)
    assert scheduler.expire(1) is None
    output, _ = step(scheduler)
    assert output.preempted == (1,)

    assert scheduler.expire(1).finish_reason is FinishReason.TIMEOUT
    assert scheduler.num_waiting == 0


def test_an_unknown_sequence_cannot_expire():
    assert make_scheduler(num_blocks=2).expire(3) is None


def test_aborting_an_unknown_request_does_nothing():
    assert make_scheduler(4).abort(9) is None


def check_aborted(scheduler, sequence):
    assert scheduler.abort(sequence.request_id) is sequence
    assert sequence.status is SequenceStatus.FINISHED
    assert sequence.finish_reason is FinishReason.ABORT
    assert sequence.block_table == []
    assert scheduler.abort(sequence.request_id) is None
    scheduler.check_invariants()


def test_a_waiting_sequence_can_be_aborted():
    scheduler = make_scheduler(4, max_num_seqs=1)
    add(scheduler, 0, 3)
    waiting = add(scheduler, 1, 3)
    step(scheduler)

    check_aborted(scheduler, waiting)

    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)


def test_a_sequence_can_be_aborted_between_two_chunks_of_its_prompt():
    scheduler = make_scheduler(4, 4, max_num_seqs=1, max_num_batched_tokens=5)
    sequence = add(scheduler, 0, 9)
    step(scheduler)

    check_aborted(scheduler, sequence)

    assert scheduler.block_manager.num_free_blocks == 4
    assert not scheduler.has_work


def test_a_decoding_sequence_can_be_aborted():
    scheduler = make_scheduler(4)
    sequence = add(scheduler, 0, 3)
    step(scheduler)
    step(scheduler)

    check_aborted(scheduler, sequence)

    assert scheduler.block_manager.num_free_blocks == 4
    assert step(scheduler)[1] == []


def test_a_preempted_sequence_can_be_aborted():
    scheduler, _, younger = start_two_that_collide()
    step(scheduler)

    check_aborted(scheduler, younger)

    assert scheduler.num_waiting == 0


def test_a_finished_sequence_cannot_be_aborted():
    scheduler = make_scheduler(4)
    sequence = add(scheduler, 0, 3, max_new_tokens=1)
    step(scheduler)

    assert scheduler.abort(0) is None

    assert sequence.finish_reason is FinishReason.LENGTH


def test_the_result_of_a_sequence_aborted_during_the_step_is_ignored():
    scheduler = make_scheduler(16)
    for request_id in range(3):
        add(scheduler, request_id, 3)
    output = begin(scheduler)

    check_aborted(scheduler, output.prefill[1].sequence)
    events = commit(scheduler, output, [[Token(20)], [Token(21)], [Token(22)]])

    assert events == [(0, TokenEvent(token_id=20)), (2, TokenEvent(token_id=22))]
    scheduler.check_invariants()


def test_the_id_of_an_aborted_sequence_can_be_reused_before_its_step_ends():
    scheduler = make_scheduler(16)
    aborted = add(scheduler, 0, 3)
    output = begin(scheduler)
    scheduler.abort(0)
    again = add(scheduler, 0, 5)

    assert commit(scheduler, output, [[Token(20)]]) == []
    assert aborted.output_token_ids == again.output_token_ids == []
    assert rows_of(step(scheduler)[0]) == [(0, 0, 5, True)]


# Results


def test_results_are_assigned_to_the_rows_that_sample_decode_rows_first():
    scheduler = make_scheduler(16, 4, max_num_seqs=4, max_num_batched_tokens=9)
    add(scheduler, 0, 3)
    step(scheduler)
    for request_id, num_tokens in ((1, 3), (2, 1), (3, 9)):
        add(scheduler, request_id, num_tokens)
    output = begin(scheduler)
    assert rows_of(output) == [(0, 3, 1, True), (2, 0, 1, True), (1, 0, 3, True), (3, 0, 4, False)]

    events = commit(scheduler, output, [[Token(20)], [Token(21)], [Token(22)], []])

    assert [(request_id, event.token_id) for request_id, event in events] == [
        (0, 20),
        (2, 21),
        (1, 22),
    ]


def test_an_event_carries_the_log_probabilities_of_its_token():
    scheduler = make_scheduler(16)
    add(scheduler, 0, 3)

    events = commit(scheduler, begin(scheduler), [[Token(5, -0.25, ((5, -0.25), (6, -2.0)))]])

    expected = TokenEvent(token_id=5, logprob=-0.25, top_tokens=((5, -0.25), (6, -2.0)))
    assert events == [(0, expected)]


@pytest.mark.parametrize(
    ("token_id", "reason"),
    [(0, FinishReason.EOS), (1, FinishReason.STOP), (2, FinishReason.LENGTH)],
)
def test_the_last_event_has_the_finish_reason_and_the_blocks_are_freed_at_once(token_id, reason):
    scheduler = make_scheduler(16)
    sequence = add(
        scheduler, 0, 3, max_new_tokens=2, eos_token_ids=(0,), stop_token_ids=(1,), min_new_tokens=1
    )
    _, first = step(scheduler, token_id)

    _, events = step(scheduler, token_id)

    assert first == [(0, TokenEvent(token_id=token_id))]
    ended = TokenEvent(token_id=token_id, finish_reason=reason, usage=sequence.usage)
    assert events == [(0, ended)]
    assert sequence.finish_reason is reason
    assert scheduler.block_manager.num_free_blocks == 16
    assert not scheduler.has_work


def test_a_result_with_an_error_ends_only_its_sequence_and_discards_its_cached_blocks():
    scheduler = make_scheduler(16, 4)
    good, bad = add(scheduler, 0, 5), add(scheduler, 1, 9)

    events = commit(scheduler, begin(scheduler), [[Token(20)], [Token(None, error="not a number")]])

    error = TokenEvent(
        token_id=None,
        finish_reason=FinishReason.ERROR,
        error="not a number",
        usage=bad.usage,
    )
    assert events == [(0, TokenEvent(token_id=20)), (1, error)]
    assert (bad.status, bad.finish_reason) == (SequenceStatus.FINISHED, FinishReason.ERROR)
    assert good.status is SequenceStatus.RUNNING
    assert scheduler.block_manager.num_idle_blocks == 0
    scheduler.check_invariants()
    again = add(scheduler, 2, bad.token_ids)
    step(scheduler)
    assert again.num_cached_tokens == 0


def test_cached_blocks_of_earlier_chunks_are_discarded_if_the_last_chunk_fails():
    scheduler = make_scheduler(16, 4, max_num_seqs=1, max_num_batched_tokens=5)
    sequence = add(scheduler, 0, 9)
    step(scheduler)
    assert sequence.num_linked_blocks == 1

    commit(scheduler, begin(scheduler), [[Token(None, error="not a number")]])

    assert scheduler.block_manager.num_idle_blocks == 0
    scheduler.check_invariants()


def test_a_step_that_failed_ends_all_its_sequences_without_results():
    scheduler = make_scheduler(16, 4, max_num_seqs=2, max_num_batched_tokens=5)
    add(scheduler, 0, 3)
    add(scheduler, 1, 9)
    waiting = add(scheduler, 2, 3)
    output = begin(scheduler)
    assert [row[3] for row in rows_of(output)] == [True, False]

    events = list(scheduler.fail(output, "the forward pass failed"))

    assert [(i, event.finish_reason, event.error) for i, event in events] == [
        (0, FinishReason.ERROR, "the forward pass failed"),
        (1, FinishReason.ERROR, "the forward pass failed"),
    ]
    assert scheduler.block_manager.num_free_blocks == 16
    assert [row[0] for row in rows_of(step(scheduler)[0])] == [waiting.request_id]


def test_a_sequence_aborted_in_a_step_that_failed_gets_no_event():
    scheduler = make_scheduler(16)
    sequence = add(scheduler, 0, 3)
    output = begin(scheduler)
    scheduler.abort(0)

    assert list(scheduler.fail(output, "the forward pass failed")) == []
    assert sequence.finish_reason is FinishReason.ABORT


def test_a_step_that_was_not_computed_can_be_scheduled_again():
    scheduler = make_scheduler(16, 4, max_num_seqs=2, max_num_batched_tokens=8)
    add(scheduler, 0, 3)
    add(scheduler, 1, 9)
    first = scheduler.schedule()
    scheduler.check_invariants()

    second = scheduler.schedule()

    assert rows_of(second) == rows_of(first)
    with pytest.raises(AssertionError, match="only the latest one"):
        scheduler.start(first)
    scheduler.start(second)
    assert [event.token_id for _, event in commit(scheduler, second, [[Token(20)], []])] == [20]
    with pytest.raises(AssertionError, match="ends once"):
        commit(scheduler, second, [[Token(20)], []])


def test_more_results_than_rows_fail_an_assertion():
    scheduler = make_scheduler(16)
    add(scheduler, 0, 3)

    with pytest.raises(AssertionError, match="2 results of 1 rows"):
        commit(scheduler, begin(scheduler), [[Token(20)], [Token(21)]])


def test_a_result_with_neither_token_nor_error_fails_an_assertion():
    scheduler = make_scheduler(16)
    add(scheduler, 0, 3)

    with pytest.raises(AssertionError, match="a token or an error"):
        commit(scheduler, begin(scheduler), [[Token(None)]])


# Several rows of logits: verification of proposed tokens


def verify(scheduler, output, num_proposed):
    """Start the step with proposed tokens after the last token of its only sequence; return it."""
    (row,) = output.decode
    more = msgspec.structs.replace(row, num_tokens=1 + num_proposed, num_logits=1 + num_proposed)
    verifying = msgspec.structs.replace(
        output, decode=DecodeRows.of(()), prefill=(more,), num_tokens=more.num_tokens
    )
    assert scheduler.block_manager.grow(row.sequence, row.start + more.num_tokens)
    scheduler._scheduled = verifying
    scheduler.start(verifying)
    return verifying


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_verified_tokens_are_kept_and_rejected_ones_are_computed_again(
    accepted,
):
    scheduler = make_scheduler(16)
    sequence = add(scheduler, 0, 3, max_new_tokens=20)
    step(scheduler)
    output = verify(scheduler, scheduler.schedule(), num_proposed=3)
    assert sequence.num_tokens_in_flight == 4

    events = commit(scheduler, output, [[Token(30 + i) for i in range(accepted)]])

    assert [event.token_id for _, event in events] == [30 + i for i in range(accepted)]
    assert sequence.output_token_ids == [7, *(30 + i for i in range(accepted))]
    assert sequence.num_tokens_in_flight == 0
    scheduler.check_invariants()
    assert rows_of(begin(scheduler)) == [(0, 3 + accepted, 1, 1)]


def test_tokens_after_the_last_token_of_a_sequence_are_dropped():
    scheduler = make_scheduler(16)
    add(scheduler, 0, 3, max_new_tokens=3)
    step(scheduler)
    output = verify(scheduler, scheduler.schedule(), num_proposed=3)

    events = commit(scheduler, output, [[Token(30), Token(31), Token(32), Token(33)]])

    assert [event.token_id for _, event in events] == [30, 31]
    assert events[-1][1].finish_reason is FinishReason.LENGTH
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks


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
    assert ended.output_token_ids == [0]
    assert other.output_token_ids == [20, 21]
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
    assert younger.output_token_ids == [20, 20, token_id]
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
    assert younger.output_token_ids == [20, 20, 22]


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


# Rows that only continue


def decoding(count, max_new_tokens=40, **options):
    scheduler = make_scheduler(64, **options)
    for i in range(count):
        add(scheduler, i, 3, max_new_tokens)
    step(scheduler)
    return scheduler


def test_steps_of_the_same_sequences_have_the_same_batch_until_one_ends():
    scheduler = decoding(3)
    batches = [step(scheduler)[0].decode.batch for _ in range(5)]
    scheduler.abort(1)
    after = step(scheduler)[0].decode.batch

    assert len(set(map(id, batches))) == 1
    assert after is not batches[0]
    assert [s.request_id for s in after.sequences] == after.request_ids == [0, 2]


def test_events_are_in_the_order_of_rows_where_one_ends_among_rows_that_continue():
    scheduler = make_scheduler(64)
    for i in range(5):
        add(scheduler, i, 3, 40, stop_token_ids=(9,))
    step(scheduler)
    output = begin(scheduler)
    results = [[Token(20, -0.5)], [Token(9, -1.0)], [Token(None, error="broken")], [Token(21)]]
    top = Token(22, -0.25, ((22, -0.25),))

    events = commit(scheduler, output, [*results, [top]])

    assert [(i, e.token_id, e.logprob, e.top_tokens, e.finish_reason) for i, e in events] == [
        (0, 20, -0.5, (), None),
        (1, 9, -1.0, (), FinishReason.STOP),
        (3, 21, None, (), None),
        (4, 22, -0.25, ((22, -0.25),), None),
        (2, None, None, (), FinishReason.ERROR),
    ]
    scheduler.check_invariants()


@pytest.mark.parametrize(
    ("caching", "expected"),
    [(True, [4, *[8] * 4, *[12] * 4, *[16] * 4, *[20] * 4, *[22] * 2]), (False, [22] * 19)],
)
def test_a_row_is_looked_at_when_it_fills_a_block_and_when_it_ends(caching, expected):
    scheduler = decoding(1, 20, enable_prefix_caching=caching)
    (sequence,) = scheduler._live.running
    limits = []
    while scheduler.has_work:
        limits.append(sequence.check_at)
        step(scheduler)

    assert limits == expected


# Grammars


class Forcing:
    """A grammar that forces tokens after each sampled one, and is complete after `length` tokens."""

    error = ""

    def __init__(self, length, forced=(1, 2, 3)):
        self.length = length
        self.forced = list(forced)
        self.accepted = []

    def accept(self, token_id):
        self.accepted.append(token_id)
        return True

    def forced_tokens(self):
        return self.forced

    @property
    def is_complete(self):
        return len(self.accepted) >= self.length


def constrained(request_id, length, prompt=3, **sampling):
    sequence = make_sequence(request_id, prompt, max_new_tokens=60, grammar="g", **sampling)
    sequence.matcher = Forcing(length)
    return sequence


def test_forced_tokens_are_computed_as_one_chunk_of_the_next_step():
    scheduler = make_scheduler(20)
    sequence = constrained(1, 6)
    scheduler.add(sequence)

    _, events = step(scheduler)
    assert [event.token_id for _, event in events] == [7, 1, 2, 3]
    output, events = step(scheduler)

    assert rows_of(output) == [(1, 3, 4, 1)]
    assert [event.token_id for _, event in events] == [7, 1]
    assert events[-1][1].finish_reason is FinishReason.EOS
    assert sequence.matcher.accepted == [7, 1, 2, 3, 7, 1]
    assert scheduler.num_generated_tokens == 6
    assert scheduler.block_manager.num_free_blocks == 20


def test_the_result_of_a_step_in_flight_is_ignored_where_forced_tokens_took_its_position():
    scheduler = make_scheduler(20)
    sequence = constrained(1, 9)
    scheduler.add(sequence)
    first = begin(scheduler)
    second = begin(scheduler)
    assert rows_of(second) == [(1, 3, 1, 1)]

    commit(scheduler, first, [[Token(7)]])
    scheduler.check_invariants()
    third = begin(scheduler)
    assert rows_of(third) == [(1, 4, 3, 1)]
    assert commit(scheduler, second, [[Token(9)]]) == []
    scheduler.check_invariants()
    events = commit(scheduler, third, [[Token(8)]])
    scheduler.check_invariants()

    assert [event.token_id for _, event in events] == [8, 1, 2, 3]
    assert sequence.output_token_ids == [7, 1, 2, 3, 8, 1, 2, 3]


def test_a_step_that_computes_a_forced_token_has_another_batch_than_the_step_in_flight():
    scheduler = make_scheduler(20)
    sequence = constrained(1, 9)
    sequence.matcher = Forcing(9, forced=[5])
    scheduler.add(sequence)
    scheduler.add(make_sequence(2, 3, max_new_tokens=9))
    first, second = begin(scheduler), begin(scheduler)
    commit(scheduler, first, [[Token(7)], [Token(8)]])

    third = begin(scheduler)

    assert rows_of(third) == [(1, 4, 1, 1), (2, 4, 1, 1)]
    assert third.decode.batch.sequences == second.decode.batch.sequences
    assert third.decode.batch is not second.decode.batch  # the host knows one of the two tokens
    commit(scheduler, second, [[Token(9)], [Token(8)]])
    fourth = begin(scheduler)
    assert fourth.decode.batch is third.decode.batch


def test_a_failed_step_in_flight_ends_a_sequence_whose_result_it_would_have_ignored():
    scheduler = make_scheduler(20)
    scheduler.add(constrained(1, 9))
    first, second = begin(scheduler), begin(scheduler)
    commit(scheduler, first, [[Token(7)]])

    [(_, event)] = list(scheduler.fail(second, "no power"))

    assert event.finish_reason is FinishReason.ERROR
    assert not scheduler.has_work


def test_chunks_of_forced_tokens_leave_a_token_of_the_budget_to_each_younger_sequence():
    scheduler = make_scheduler(40, max_num_seqs=4, max_num_batched_tokens=6)
    for i in range(2):
        scheduler.add(constrained(i, 50, prompt=2))
    for i in (2, 3):
        scheduler.add(make_sequence(i, 1, max_new_tokens=20))
    while scheduler.num_running < 4:
        step(scheduler)

    for _ in range(6):
        output, _ = step(scheduler)
        assert {row[0] for row in rows_of(output)} == {0, 1, 2, 3}
        assert output.num_tokens <= 6


def test_decode_rows_without_logits_come_last():
    scheduler = make_scheduler(40, max_num_seqs=3, max_num_batched_tokens=3)
    scheduler.add(constrained(0, 50, prompt=1))
    for i in (1, 2):
        scheduler.add(make_sequence(i, 1, max_new_tokens=20))
    step(scheduler)

    output, _ = step(scheduler)

    assert rows_of(output) == [(1, 1, 1, 1), (2, 1, 1, 1), (0, 1, 1, 0)]


def test_a_token_that_the_grammar_refuses_ends_the_sequence_with_an_error():
    scheduler = make_scheduler(20)
    sequence = constrained(1, 9)
    sequence.matcher.accept = lambda token_id: False
    scheduler.add(sequence)

    _, [(_, event)] = step(scheduler)

    assert event.finish_reason is FinishReason.ERROR
    assert "grammar" in event.error
    assert scheduler.block_manager.num_free_blocks == 20


def test_log_probabilities_and_bad_words_need_a_step_for_each_forced_token():
    for sampling in ({"logprobs": True}, {"top_logprobs": 1}, {"bad_words": ((5,),)}):
        scheduler = make_scheduler(20)
        scheduler.add(constrained(1, 9, **sampling))

        _, events = step(scheduler)

        assert [event.token_id for _, event in events] == [7]


def test_the_rest_of_a_prompt_that_got_a_single_token_counts_as_queued():
    scheduler = make_scheduler(num_blocks=100, max_num_seqs=4, max_num_batched_tokens=4)
    add(scheduler, 1, 64)
    step(scheduler)
    add(scheduler, 2, 20)
    output, _ = step(scheduler)

    assert rows_of(output) == [(2, 0, 1, 0), (1, 4, 3, 0)]
    assert scheduler.num_prefill_tokens == 19 + 57


def test_places_that_aborted_sequences_free_count_in_the_rate_of_ends():
    scheduler = make_scheduler(num_blocks=100, max_num_seqs=1)
    for i in range(5):
        add(scheduler, i, 4, 20)
    for i in range(3):
        output = scheduler.schedule()
        scheduler.start(output)
        scheduler.abort(i)
        commit(scheduler, output, [[Token(7)]], 0.5)

    assert scheduler.end_rate.value == pytest.approx(2.0)
