"""The results of a step: tokens, errors, rejected and forced tokens, and rows that only continue."""

from __future__ import annotations

import msgspec
import pytest

from server.engine.core.request import (
    FinishReason,
    TokenEvent,
)
from server.engine.core.sequence import (
    SequenceStatus,
)
from server.engine.core.step import (
    DecodeRows,
)
from tests.engine.core.bookkeeping import (
    Token,
    add,
    begin,
    commit,
    make_scheduler,
    make_sequence,
    output_of,
    propose,
    rows_of,
    step,
)

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
    assert output_of(sequence) == [7, *(30 + i for i in range(accepted))]
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


def draft(scheduler, request_id=0, ids=(30, 31, 32)):
    """Start a step in which a sequence has a draft; return it."""
    output = propose(scheduler, scheduler.schedule(), {request_id: ids})
    scheduler.start(output)
    scheduler.check_invariants()
    return output


@pytest.mark.parametrize(
    ("sampled", "kept"),
    [
        ([30, 31, 32, 33], 4),
        ([30, 31, 99, 33], 3),
        ([99, 31, 32, 33], 1),
    ],
)
def test_sampled_tokens_are_kept_up_to_the_first_that_is_not_the_drafts(sampled, kept):
    scheduler = make_scheduler(16, 2)
    sequence = add(scheduler, 0, 3, max_new_tokens=20)
    step(scheduler)
    output = draft(scheduler)
    assert (sequence.num_tokens_in_flight, output.num_tokens) == (4, 4)

    events = commit(scheduler, output, [[Token(it, -1.0 - it) for it in sampled]])

    assert [(event.token_id, event.logprob) for _, event in events] == [
        (it, -1.0 - it) for it in sampled[:kept]
    ]
    assert output_of(sequence) == [7, *sampled[:kept]]
    assert sequence.num_tokens_in_flight == 0
    assert sequence.num_linked_blocks == (3 + kept) // 2
    scheduler.check_invariants()
    assert rows_of(begin(scheduler)) == [(0, 3 + kept, 1, 1)]


def test_rows_with_and_without_drafts_are_entered_in_order():
    scheduler = make_scheduler(64)
    for i in range(4):
        add(scheduler, i, 3, 40, stop_token_ids=(9,))
    step(scheduler)
    output = draft(scheduler, 1)

    events = commit(
        scheduler,
        output,
        [
            [Token(20)],
            [Token(30), Token(9), Token(32), Token(33)],
            [Token(None, error="broken")],
            [Token(23, -0.5)],
        ],
    )

    assert [(i, e.token_id, e.logprob, e.finish_reason) for i, e in events] == [
        (0, 20, None, None),
        (1, 30, None, None),
        (1, 9, None, FinishReason.STOP),
        (3, 23, -0.5, None),
        (2, None, None, FinishReason.ERROR),
    ]
    scheduler.check_invariants()


def test_a_sequence_that_ends_within_its_draft_has_computed_no_token_after_its_end():
    scheduler = make_scheduler(16, 2)
    add(scheduler, 0, 3, max_new_tokens=20, eos_token_ids=(31,))
    step(scheduler)
    output = draft(scheduler)

    events = commit(scheduler, output, [[Token(30), Token(31), Token(32), Token(33)]])

    assert [event.token_id for _, event in events] == [30, 31]
    assert events[-1][1].finish_reason is FinishReason.EOS
    usage = events[-1][1].usage
    assert (usage.num_draft_tokens, usage.num_accepted_tokens) == (3, 2)
    assert usage.num_recomputed_tokens == 0
    assert scheduler.block_manager.num_free_blocks == 16


def test_an_error_after_the_last_kept_token_has_no_effect():
    scheduler = make_scheduler(16)
    sequence = add(scheduler, 0, 3, max_new_tokens=20)
    step(scheduler)
    broken = Token(None, error="not a number")

    events = commit(scheduler, draft(scheduler), [[Token(30), Token(99), broken, broken]])

    assert [event.token_id for _, event in events] == [30, 99]
    events = commit(scheduler, draft(scheduler), [[Token(30), broken, Token(32), Token(33)]])
    assert [(event.token_id, event.error) for _, event in events] == [
        (30, None),
        (None, "not a number"),
    ]
    assert sequence.finish_reason is FinishReason.ERROR


def test_a_failed_step_with_drafts_ends_its_sequences():
    scheduler = make_scheduler(16)
    add(scheduler, 0, 3, max_new_tokens=20)
    step(scheduler)

    events = list(scheduler.fail(draft(scheduler), "the forward pass failed"))

    assert [(event.token_id, event.error) for _, event in events] == [
        (None, "the forward pass failed")
    ]
    assert scheduler.block_manager.num_free_blocks == 16


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
        self.forced_after = {}
        self.accepted = []

    def accept(self, token_id):
        self.accepted.append(token_id)
        return True

    def continues_after(self, token_id):
        return False

    def take_ahead(self, token_id, most, end_ids):
        return None

    def forced_tokens(self):
        return self.forced_after.get(self.accepted[-1] if self.accepted else None, self.forced)

    @property
    def is_complete(self):
        return len(self.accepted) >= self.length


def constrained(request_id, length, prompt=3, **sampling):
    sequence = make_sequence(request_id, prompt, max_new_tokens=60, grammar="g", **sampling)
    sequence.matcher = Forcing(length)
    return sequence


def test_tokens_that_a_grammar_forces_take_the_place_of_a_draft():
    scheduler = make_scheduler(20)
    sequence = constrained(0, 60)
    sequence.matcher.forced = []
    scheduler.add(sequence)
    step(scheduler)
    output = draft(scheduler)
    sequence.matcher.forced_after = {31: [1, 2, 3]}

    events = commit(scheduler, output, [[Token(30), Token(31), Token(32), Token(33)]])

    assert [event.token_id for _, event in events] == [30, 31, 1, 2, 3]
    scheduler.check_invariants()
    assert rows_of(begin(scheduler)) == [(0, 5, 4, 1)]


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
    assert output_of(sequence) == [7, 1, 2, 3, 8, 1, 2, 3]


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
