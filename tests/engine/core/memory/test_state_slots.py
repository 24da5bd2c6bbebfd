"""Slots for states of fixed size: who has which, and which snapshots the prefix cache keeps."""

import pytest

from server.engine.core.memory.state_slots import NO_SLOT, StateSlots, interval_of, marks_of
from tests.engine.core.bookkeeping import (
    Token,
    add,
    begin,
    commit,
    finish_everything,
    make_scheduler,
    propose,
    rows_of,
    step,
)

PROMPT = list(range(100, 119))


def scheduler(num_slots=8, num_blocks=40, **limits):
    return make_scheduler(num_blocks, block_size=4, num_slots=num_slots, **limits)


def chunks(found):
    """Return (start, number of tokens) of the rows of every step of the only sequence."""
    return [(start, count) for output in found for _, start, count, _ in rows_of(output)]


def serve(it, request_id, prompt, max_new_tokens=1):
    """Serve a request alone; return it and its chunks."""
    sequence = add(it, request_id, prompt, max_new_tokens)
    found = []
    while it.has_work:
        found.append(step(it)[0])
    return sequence, chunks(found)


def num_snapshots(it):
    return len(it.block_manager.slots._snapshots)


def test_a_network_without_states_has_no_slots():
    it = make_scheduler(10)
    sequence = add(it, 1, PROMPT)
    output = begin(it)

    assert it.block_manager.slots is None
    assert sequence.slots is None
    assert rows_of(output) == [(1, 0, 19, 1)]


def test_a_sequence_reads_nothing_at_first_and_then_the_slot_that_it_writes():
    it = scheduler(enable_prefix_caching=False)
    sequence = add(it, 1, PROMPT)
    output = it.schedule()
    assert sequence.slots.read == NO_SLOT
    it.start(output)
    assert sequence.slots.read == sequence.slots.write
    commit(it, output, [[Token(7)]])
    finish_everything(it)

    assert sequence.slots is None
    assert len(it.block_manager.slots._free) == 8


def test_a_step_ends_after_the_last_full_block_of_a_prompt_where_the_state_is_kept():
    it = scheduler()

    _, computed = serve(it, 1, PROMPT, 3)

    assert computed == [(0, 16), (16, 3), (19, 1), (20, 1)]
    assert num_snapshots(it) == 1


def test_an_equal_prompt_and_a_longer_one_begin_at_the_snapshot():
    it = scheduler()
    serve(it, 1, PROMPT)

    assert serve(it, 2, PROMPT)[1] == [(16, 3)]
    again, computed = serve(it, 3, [*PROMPT, 1, 2, 3])
    assert again.num_cached_tokens == 16
    assert computed == [(16, 4), (20, 2)]


def test_blocks_without_a_snapshot_are_computed_again_and_the_state_is_kept_where_they_end():
    it = scheduler()
    serve(it, 1, PROMPT)
    branch = [*PROMPT[:10], 5, 6, 7, 8, 9]

    first, computed = serve(it, 2, branch)
    assert first.num_cached_tokens == 0
    assert computed == [(0, 8), (8, 4), (12, 3)]
    second, computed = serve(it, 3, [*PROMPT[:9], 4, 4, 4, 4])
    assert second.num_cached_tokens == 8
    assert computed == [(8, 4), (12, 1)]


def test_a_prompt_that_is_not_looked_up_is_not_divided():
    it = scheduler()
    add(it, 1, PROMPT, prompt_logprobs=True)

    assert chunks([step(it)[0]]) == [(0, 19)]
    finish_everything(it)
    assert num_snapshots(it) == 0


def test_a_snapshot_leaves_with_its_block():
    it = scheduler(num_blocks=6)
    serve(it, 1, PROMPT)
    assert num_snapshots(it) == 1

    serve(it, 2, list(range(200, 219)))

    assert num_snapshots(it) == 1
    assert serve(it, 3, PROMPT)[0].num_cached_tokens == 0


def test_a_snapshot_stays_with_its_content_when_another_block_replaces_the_first():
    it = scheduler()
    serve(it, 1, PROMPT)
    # A prompt of exactly these blocks computes the last one anew; its snapshot is before that.
    serve(it, 2, PROMPT[:16])

    assert serve(it, 3, PROMPT)[0].num_cached_tokens == 16


def test_the_snapshot_that_was_used_longest_ago_leaves_first():
    it = scheduler(num_slots=3, max_num_seqs=1)
    prompts = [[100 * n + i for i in range(9)] for n in range(3)]
    serve(it, 1, prompts[0])
    serve(it, 2, prompts[1])
    assert serve(it, 3, prompts[0])[0].num_cached_tokens == 8

    serve(it, 4, prompts[2])

    assert serve(it, 5, prompts[0])[0].num_cached_tokens == 8
    assert serve(it, 6, prompts[1])[0].num_cached_tokens == 0


def test_an_aborted_and_a_failed_sequence_release_their_slots_and_what_they_keep():
    it = scheduler()
    add(it, 1, PROMPT)
    add(it, 2, [3, *PROMPT])
    output = begin(it)
    assert sum(it.block_manager.slots._holds) == 6

    it.abort(1)
    it.check_invariants()
    it.fail(output, "broken")
    it.check_invariants()

    assert not it.has_work
    assert len(it.block_manager.slots._free) == 8


def test_a_preempted_sequence_has_no_slots_and_begins_again():
    it = scheduler(num_slots=2, num_blocks=8, max_num_seqs=2, enable_prefix_caching=False)
    add(it, 1, 8, 12)
    second = add(it, 2, 8, 12)
    while not it.num_preemptions:
        step(it)

    assert second.slots is None
    assert second.num_computed_tokens == 0
    finish_everything(it)
    assert it.idle_violations() == []


def test_a_sequence_waits_while_no_slot_can_be_given_to_it():
    slots = StateSlots(3)
    first = slots.admit(None, [4])
    slots.advance(first, 4)  # keeps a slot and writes another one
    second = slots.admit(None, [])

    assert slots.admit(None, []) is None
    slots.free(second)
    assert slots.admit(None, []) is not None


def test_a_snapshot_that_a_step_is_about_to_read_is_not_replaced():
    slots = StateSlots(2)
    writer = slots.admit(None, [4])
    slots.advance(writer, 4)
    slots.keep(writer, 4, link=1)
    slots.free(writer)
    reader = slots.admit(1, [])

    assert slots.admit(None, []) is None
    slots.forget(1)
    assert slots.admit(None, []) is None
    slots.advance(reader, 5)
    assert slots.admit(None, []) is not None


def test_lost_slots_are_found_in_idle_times():
    slots = StateSlots(2)
    assert slots.idle_violations() == []
    slots.admit(None, [])

    assert slots.idle_violations() == ["1 free slots and 0 snapshots are not 2"]
    with pytest.raises(AssertionError):
        slots.check_invariants([], [])


def test_free_slots_and_snapshots_come_to_all_slots_while_no_sequence_runs():
    it = scheduler(num_slots=4)
    serve(it, 1, PROMPT)
    slots = it.block_manager.slots

    assert (len(slots._free), num_snapshots(it)) == (3, 1)
    assert slots.idle_violations() == []
    slots._free.pop()
    assert slots.idle_violations() == ["2 free slots and 1 snapshots are not 4"]


@pytest.mark.parametrize("budget", [15, 16, 1, 5, 7])
def test_a_state_is_kept_whether_one_token_or_many_come_before_it(budget):
    """A chunk of one token is a row as those that decode; with 15 tokens in a step it ends where the state is kept."""
    it = scheduler(max_num_seqs=1, max_num_batched_tokens=budget)

    _, computed = serve(it, 1, PROMPT, 2)

    ends = [start + count for start, count in computed]
    assert 16 in ends
    assert num_snapshots(it) == 1
    again, computed = serve(it, 2, PROMPT, 1)
    assert again.num_cached_tokens == 16
    assert computed[0][0] == 16


def test_rows_that_read_and_write_other_slots_are_another_batch():
    it = scheduler(num_slots=8, enable_prefix_caching=False, max_num_seqs=2)
    add(it, 1, PROMPT[:2], 6)
    add(it, 2, PROMPT[:3], 6)
    step(it)
    batches = [step(it)[0].decode.batch for _ in range(3)]

    # All decode, with one slot each to read and to write.
    assert batches[0] is batches[1] is batches[2]


def snapshot(slots, link, num_tokens, *, start=None, mark=False):
    """Let a sequence end that leaves a snapshot after `num_tokens` tokens."""
    held = slots.admit(start, [] if mark else [num_tokens])
    held.stop = num_tokens
    held.interval = 4 if mark else 0
    slots.advance(held, num_tokens)
    if num_tokens in held.kept:
        slots.keep(held, num_tokens, link)
    slots.free(held)


def test_snapshots_at_intervals_leave_before_those_at_ends_of_prompts():
    slots = StateSlots(4)
    snapshot(slots, 1, 4)
    snapshot(slots, 2, 8, mark=True)
    snapshot(slots, 3, 4)
    running = [slots.admit(None), slots.admit(None)]

    assert (slots.longest([1]), slots.longest([2]), slots.longest([3])) == (1, 0, 1)
    slots.check_invariants(running, [1, 2, 3])
    assert (slots.num_taken, slots.num_evicted) == (3, 1)


def test_a_snapshot_at_an_interval_lasts_once_a_sequence_began_at_it():
    slots = StateSlots(4)
    snapshot(slots, 1, 4)
    snapshot(slots, 2, 8, mark=True)
    slots.free(slots.admit(2))
    snapshot(slots, 3, 12, mark=True)
    running = [slots.admit(None) for _ in range(3)]

    assert (slots.longest([1]), slots.longest([2]), slots.longest([3])) == (0, 1, 0)
    assert slots.num_hits == 1
    slots.check_invariants(running, [1, 2, 3])


def test_a_state_at_an_interval_takes_the_slot_of_no_snapshot_that_lasts():
    slots = StateSlots(2)
    snapshot(slots, 1, 4)
    snapshot(slots, 2, 8, mark=True)

    assert (slots.longest([1]), slots.longest([2])) == (1, 0)


def test_the_last_prompt_of_a_conversation_replaces_the_one_before():
    slots = StateSlots(4)
    snapshot(slots, 1, 4)
    snapshot(slots, 2, 8)
    snapshot(slots, 3, 12, start=1)  # goes on from the first
    slots.admit(None)
    slots.admit(None)

    assert (slots.longest([1]), slots.longest([2]), slots.longest([3])) == (0, 1, 1)


def test_a_beginning_of_several_prompts_is_not_superseded():
    slots = StateSlots(5)
    snapshot(slots, 1, 4)
    slots.free(slots.admit(1))
    snapshot(slots, 2, 8, start=1)
    snapshot(slots, 3, 8, start=2)

    assert {link: it.is_lasting for link, it in slots._snapshots.items()} == {
        1: True,
        2: False,
        3: True,
    }


def test_longer_prompts_have_longer_intervals():
    assert [interval_of(n) for n in (1, 4096, 4097, 131072)] == [512, 512, 1024, 16384]


def test_states_are_kept_close_to_each_other_while_slots_are_free():
    assert marks_of(1000, 0, 960, 64, 100) == [*range(64, 960, 64)]
    assert marks_of(1000, 512, 960, 64, 100) == [*range(576, 960, 64)]
    assert marks_of(1000, 0, 960, 64, 20) == [512]
    assert marks_of(20000, 0, 19968, 64, 100) == [512, 1024, 2048, *range(4096, 19968, 4096)]
    assert len(marks_of(1 << 20, 0, 1 << 20, 64, 1 << 20)) <= 160
    assert all(count % 48 == 0 for count in marks_of(5000, 0, 4992, 48, 0))


def test_states_within_a_prompt_take_no_step_of_their_own():
    it = scheduler(num_slots=60, num_blocks=60, keeps_inside=True)

    _, computed = serve(it, 1, PROMPT, 2)

    assert computed == [(0, 19), (19, 1)]
    assert num_snapshots(it) == 4
    assert serve(it, 2, [*PROMPT[:13], 5, 5])[1] == [(12, 3)]
    assert it.idle_violations() == []


@pytest.mark.parametrize("keeps_inside", [False, True], ids=["cut", "kept inside"])
@pytest.mark.parametrize("budget", [8, 9, 12, 100])
def test_prompts_end_in_steps_at_multiples_of_the_chunk(budget, keeps_inside):
    it = scheduler(
        num_slots=20, state_chunk=8, keeps_inside=keeps_inside,
        max_num_seqs=1, max_num_batched_tokens=budget,
    )  # fmt: skip

    _, computed = serve(it, 1, range(100, 144), 2)

    ends = [start + count for start, count in computed]
    assert all(end % 8 == 0 or end >= 44 for end in ends)
    assert serve(it, 2, range(100, 144))[0].num_cached_tokens == 40


def test_the_last_token_of_a_prompt_is_alone_if_it_may_be_after_a_hit():
    it = scheduler(num_slots=20, state_chunk=8, keeps_inside=True)

    assert serve(it, 1, range(100, 141))[1] == [(0, 40), (40, 1)]
    assert serve(it, 2, range(100, 141))[1] == [(40, 1)]


@pytest.mark.parametrize(
    ("deterministic", "expected"), [(True, [(24, 4), (28, 1), (29, 1)]), (False, [(24, 6)])]
)
def test_generated_tokens_are_computed_again_as_they_were_if_their_bits_matter(
    deterministic, expected
):
    it = scheduler(state_chunk=8, max_num_seqs=1)
    sequence = add(it, 1, list(range(100, 128)), 6)
    sequence.deterministic = deterministic
    for _ in range(3):
        step(it)
    assert sequence.num_tokens == 30
    it._live.preempt(sequence)

    found = []
    while it.has_work and sequence.num_tokens < 31:
        found.append(step(it)[0])

    assert chunks(found) == expected
    finish_everything(it)


def test_output_is_not_cached_where_prompts_are_computed_in_chunks():
    it = scheduler(state_chunk=8)
    first, _ = serve(it, 1, range(100, 120), 16)

    assert it.block_manager.num_idle_blocks == 5
    again, _ = serve(it, 2, [*first.token_ids, 1])
    assert again.num_cached_tokens == 16


def test_the_slots_of_a_draft_are_free_again_but_that_of_the_last_right_token():
    slots = StateSlots(6)
    slots.reserve_for_drafts(0)
    held = slots.admit(None)
    assert not held.may_have_draft  # it reads nothing yet
    slots.advance(held, 1)
    assert held.may_have_draft

    assert slots.lend(held, 3) == 3
    lent = [*held.drafts]
    slots.check_invariants([held], ())
    assert slots.accept(held, 2)
    assert held.read == held.write == lent[1]
    assert not held.drafts
    assert slots.num_free == 5

    written = held.write
    assert slots.lend(held, 9) == 5
    assert not slots.accept(held, 0)
    assert held.write == written
    slots.check_invariants([held], ())
    slots.lend(held, 2)
    slots.free(held)
    assert slots.idle_violations() == []


def test_a_draft_takes_the_slots_of_snapshots_that_do_not_last_and_no_others():
    slots = StateSlots(6)
    slots.reserve_for_drafts(1)
    snapshot(slots, 1, 4)
    snapshot(slots, 2, 8, mark=True)
    held, other = slots.admit(None), slots.admit(None)
    slots.advance(held, 1)
    slots.advance(other, 1)

    assert slots.num_free == 1
    assert slots.num_for_drafts() == 3
    assert slots.lend(held, 7) == 3
    assert slots.lend(other, 7) == 0
    assert (slots.longest([1]), slots.longest([2])) == (1, 0)
    slots.check_invariants([held, other], (1,))
    slots.accept(held, 3)
    assert slots.num_for_drafts() == 3
    slots.free(held)
    slots.free(other)
    assert slots.idle_violations() == []


def test_slots_for_drafts_are_for_nothing_else():
    slots = StateSlots(4)
    slots.reserve_for_drafts(2)

    held = [slots.admit(None), slots.admit(None)]
    assert slots.admit(None) is None
    for it in held:
        slots.advance(it, 1)
    assert slots.lend(held[0], 2) == 2
    assert slots.accept(held[0], 1)
    assert slots.admit(None) is None
    slots.check_invariants(held, ())


def test_a_draft_that_was_scheduled_and_not_launched_returns_its_slots():
    it = scheduler(num_slots=8, enable_prefix_caching=False, max_num_seqs=2)
    slots = it.block_manager.slots
    slots.reserve_for_drafts(0)
    sequence = add(it, 1, PROMPT, 8)
    step(it)
    output = it.schedule()
    assert it.block_manager.lend_for_draft(sequence, 3) == 3
    it._scheduled = propose(it, output, {1: [1, 2, 3]})

    it.schedule()

    assert not sequence.slots.drafts
    assert slots.num_free == 7
    finish_everything(it)
    assert it.idle_violations() == []
