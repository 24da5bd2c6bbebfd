"""Equal shares of places, blocks and prompt tokens: a client that has less is served at once."""

import pytest

from server.engine.core.schedule import short_steps
from server.engine.core.schedule.prompt_chunks import Chunk, NoneWaiting, divide
from tests.engine.core.bookkeeping import (
    Token,
    add,
    begin,
    commit,
    make_scheduler,
    make_sequence,
    rows_of,
    step,
)


def running(scheduler):
    return [sequence.request_id for sequence in scheduler._live.running]


def flood(scheduler, count, prompt=4, max_new_tokens=20, **options):
    for i in range(count):
        add(scheduler, i, prompt, max_new_tokens, client="flood", **options)
    for _ in range(3):
        step(scheduler)


def test_a_client_alone_has_all_places():
    scheduler = make_scheduler(100, max_num_seqs=4)
    flood(scheduler, 6)

    assert running(scheduler) == [0, 1, 2, 3]
    assert not scheduler.num_preemptions


def test_a_second_client_is_computed_in_the_next_step_though_all_places_are_taken():
    scheduler = make_scheduler(100, max_num_seqs=4)
    flood(scheduler, 6)
    for i in (10, 11, 12):
        add(scheduler, i, 4, client="other")

    output, _ = step(scheduler)

    assert [row[0] for row in rows_of(output)] == [0, 1, 10, 11]
    assert output.preempted == (3, 2)
    step(scheduler)
    assert scheduler.num_preemptions == 2, "equal shares are kept"


def test_what_was_preempted_comes_back_before_what_its_client_has_sent_later():
    scheduler = make_scheduler(100, max_num_seqs=4)
    flood(scheduler, 6)
    add(scheduler, 10, 4, max_new_tokens=1, client="other")
    step(scheduler)
    assert running(scheduler) == [0, 1, 2]

    output, _ = step(scheduler)

    assert running(scheduler) == [0, 1, 2, 3]
    assert output.num_tokens < 4 + 7, "its blocks are in the prefix cache"


def test_many_clients_with_one_sequence_each_preempt_none():
    scheduler = make_scheduler(100, max_num_seqs=4)
    for i in range(40):
        add(scheduler, i, 4, client=f"client {i}")
    while scheduler.has_work:
        step(scheduler)

    assert not scheduler.num_preemptions


def test_blocks_are_taken_from_the_client_with_the_most_but_never_from_the_first_sequence():
    scheduler = make_scheduler(12, 4, max_num_seqs=8)
    flood(scheduler, 3, prompt=12, max_new_tokens=4)
    assert running(scheduler) == [0, 1, 2]
    add(scheduler, 10, 6, max_new_tokens=2, client="other")

    output, _ = step(scheduler)

    assert 10 in running(scheduler)
    assert output.preempted == (2,)


def test_nothing_is_preempted_for_a_sequence_that_would_then_have_more_than_its_share():
    scheduler = make_scheduler(12, 4, max_num_seqs=8)
    flood(scheduler, 3, prompt=12, max_new_tokens=4)
    add(scheduler, 10, 30, max_new_tokens=2, client="other")

    output, _ = step(scheduler)

    assert not output.preempted


def test_a_block_that_a_sequence_needs_comes_from_the_client_with_the_most():
    scheduler = make_scheduler(8, 4, max_num_seqs=8)
    for i in range(3):
        add(scheduler, i, 7, max_new_tokens=9, client="flood")
    add(scheduler, 3, 3, max_new_tokens=2, client="other")
    step(scheduler)
    assert 3 in running(scheduler)

    for _ in range(3):
        output, _ = step(scheduler)

    assert 3 not in output.preempted


@pytest.mark.parametrize(("granted", "preempts"), [(0, True), (-1, False)])
def test_sequences_of_a_lower_priority_number_are_not_preempted(granted, preempts):
    scheduler = make_scheduler(100, max_num_seqs=4)
    flood(scheduler, 6, priority=granted)
    add(scheduler, 10, 4, client="other")

    step(scheduler)

    assert (10 in running(scheduler)) == preempts


def test_a_client_priority_orders_only_the_sequences_of_its_client():
    scheduler = make_scheduler(100, max_num_seqs=1)
    add(scheduler, 0, 4, 1, client="first")
    step(scheduler)
    for i, (client, priority) in enumerate([("a", 0), ("a", -9), ("b", 0), ("a", -9), ("b", 0)]):
        add(scheduler, 1 + i, 4, 1, client=client, client_priority=priority)

    order = [rows_of(step(scheduler)[0])[0][0] for _ in range(5)]

    assert order == [2, 3, 4, 5, 1]


def divided(budget, *prompts, **options):
    """Return the tokens of each of some running prompts, given as (client, length)."""
    chunks = []
    for i, (client, length) in enumerate(prompts):
        sequence = make_sequence(i, length, client=client)
        sequence.rank = (0, i)
        chunks.append(Chunk.of(sequence, length))
    return [row.num_tokens for row in divide(budget, chunks, NoneWaiting(), **options)]


def test_prompts_of_a_client_with_several_have_together_an_equal_part_of_a_step():
    flood = [("flood", 200 + i) for i in range(5)]

    tokens = divided(60, *flood, ("other", 300))

    assert tokens == [1 + 15 + 15, 1, 1, 1, 1, 1 + 30]


def test_what_another_client_does_not_need_goes_to_the_client_with_several_prompts():
    tokens = divided(60, ("flood", 200), ("flood", 250), ("other", 10))

    assert tokens[2] == 10
    assert sum(tokens) == 60 + 3


def test_prompts_of_a_client_with_a_limit_have_no_more_whatever_is_left():
    tokens = divided(60, ("flood", 200), ("flood", 250), ("other", 10), limits={"flood": 4})

    assert tokens[2] == 10
    assert sum(tokens) == 10 + 2 + 4


def timed_step(scheduler):
    output = begin(scheduler)
    seconds = 0.001 * max(4, output.num_tokens)
    rows = (*output.decode, *output.prefill)
    commit(scheduler, output, [[Token(7)] * row.num_logits for row in rows], seconds)
    scheduler.accounting.now += seconds
    scheduler.check_invariants()
    return output


def limited(scheduler, monkeypatch, count=20):
    """Let a client flood beside another one, with steps that take as long as 4 tokens and their own."""
    monkeypatch.setattr(short_steps, "_MANY", 10)
    add(scheduler, 100, 3, 1, client="other")
    output = timed_step(scheduler)
    for i in range(count):
        add(scheduler, i, 4, 30, client="flood")
    for _ in range(8):
        output = timed_step(scheduler)
    return output


def test_a_client_that_floods_has_few_rows_while_another_one_is_expected(monkeypatch):
    scheduler = make_scheduler(1000, max_num_seqs=32, max_num_batched_tokens=64)

    output = limited(scheduler, monkeypatch)

    assert len(scheduler._live.running) == 4  # 2 * 4 ms are 8 tokens, half of them rows
    assert output.num_tokens <= 8
    add(scheduler, 200, 10, 2, client="other")
    output, _ = step(scheduler)
    assert {row[0]: row[2] for row in rows_of(output)}[200] == 10, "others have no such limit"


def test_a_client_that_floods_has_all_rows_again_a_minute_after_the_last_request_of_another_one(
    monkeypatch,
):
    scheduler = make_scheduler(1000, max_num_seqs=32, max_num_batched_tokens=64)
    limited(scheduler, monkeypatch)

    scheduler.accounting.now += 61.0
    step(scheduler)

    assert len(scheduler._live.running) > 4
