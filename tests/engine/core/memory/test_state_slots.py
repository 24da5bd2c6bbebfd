"""Slots for states of fixed size: who has which, and which snapshots the prefix cache keeps."""

import pytest

from server.engine.core.memory.state_slots import NO_SLOT, StateSlots
from tests.engine.core.bookkeeping import (
    Token,
    add,
    begin,
    commit,
    finish_everything,
    make_scheduler,
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
