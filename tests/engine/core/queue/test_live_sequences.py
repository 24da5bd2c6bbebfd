"""Sequences that are preempted, aborted or end because of their deadline."""

from __future__ import annotations

from server.engine.core.request import (
    FinishReason,
    TokenEvent,
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
    assert [output_of(sequence) for sequence in sequences] == list(tokens.values())
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
    assert output_of(low)


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
    assert output_of(aborted) == output_of(again) == []
    assert rows_of(step(scheduler)[0]) == [(0, 0, 5, True)]


# Withdrawal


def test_a_queued_sequence_is_withdrawn_and_may_return():
    scheduler = make_scheduler(8, 4, max_num_seqs=1)
    running = add(scheduler, 0, 3, max_new_tokens=3)
    queued = add(scheduler, 1, 3)
    step(scheduler)

    assert not scheduler.withdraw(running)
    assert scheduler.withdraw(queued)
    assert not scheduler.withdraw(queued)
    assert scheduler.num_waiting == 0
    scheduler.check_invariants()
    scheduler.add(queued)
    finish_everything(scheduler)
    assert queued.finish_reason is FinishReason.LENGTH
    assert scheduler.idle_violations() == []


def test_a_preempted_sequence_is_not_withdrawn():
    scheduler, _, younger = start_two_that_collide()
    step(scheduler)

    assert younger.status is SequenceStatus.WAITING
    assert not scheduler.withdraw(younger)
