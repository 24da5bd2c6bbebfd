from __future__ import annotations

import pytest

from server.engine.core.memory.block_manager import BlockManager
from tests.engine.core.bookkeeping import make_sequence


def compute(manager: BlockManager, sequence) -> None:
    """Do the bookkeeping of a step that computes all known tokens."""
    sequence.num_computed_tokens = sequence.num_tokens
    manager.cache_full_blocks(sequence, sequence.num_computed_tokens)
    manager.check_invariants()


def run_through(manager: BlockManager, sequence):
    """Admit, compute and free a sequence; return its blocks."""
    assert manager.admit(sequence)
    compute(manager, sequence)
    table = sequence.block_table
    manager.free(sequence)
    manager.check_invariants()
    return table


def fill_all_empty_blocks(manager: BlockManager, request_id: int):
    """Add a sequence that gets every empty block and no idle one."""
    num_empty = manager.num_free_blocks - manager.num_idle_blocks
    sequence = make_sequence(request_id, num_empty * manager.block_size - 1)
    assert manager.admit(sequence)
    return sequence


# Admission and growth


@pytest.mark.parametrize(
    ("num_tokens", "table"),
    [(1, [0]), (3, [0]), (4, [0, 1]), (5, [0, 1]), (7, [0, 1]), (8, [0, 1, 2])],
)
def test_admission_gives_blocks_for_the_known_tokens_and_one_more(num_tokens, table):
    manager = BlockManager(8, 4)
    sequence = make_sequence(0, num_tokens)

    assert manager.admit(sequence)

    assert sequence.block_table == table
    assert sequence.num_computed_tokens == 0
    assert manager.num_free_blocks == 8 - len(table)
    assert manager.owners == {sequence}
    manager.check_invariants()


@pytest.mark.parametrize(("num_tokens", "fits"), [(10, True), (11, True), (12, False)])
def test_a_prompt_is_admitted_only_if_it_and_one_more_token_fit(num_tokens, fits):
    manager = BlockManager(3, 4)
    sequence = make_sequence(0, num_tokens)

    assert manager.admit(sequence) is fits

    assert len(sequence.block_table) == (3 if fits else 0)
    assert manager.num_free_blocks == (0 if fits else 3)
    manager.check_invariants()


@pytest.mark.parametrize(("num_spare", "fits"), [(0, True), (1, True), (2, False)])
def test_spare_blocks_stay_free(num_spare, fits):
    manager = BlockManager(4, 4)

    assert manager.admit(make_sequence(0, 11), num_spare=num_spare) is fits


def test_growth_takes_a_block_only_where_a_token_needs_one():
    manager = BlockManager(4, 4)
    sequence = make_sequence(0, 3)
    manager.admit(sequence)

    assert manager.grow(sequence, 4)
    assert sequence.block_table == [0]
    assert manager.grow(sequence, 5)
    assert sequence.block_table == [0, 1]
    assert manager.grow(sequence, 16)
    assert sequence.block_table == [0, 1, 2, 3]
    manager.check_invariants()


def test_growth_that_does_not_fit_changes_nothing():
    manager = BlockManager(3, 4)
    sequence = make_sequence(0, 3)
    manager.admit(sequence)

    assert not manager.grow(sequence, 13)

    assert sequence.block_table == [0]
    assert manager.num_free_blocks == 2
    manager.check_invariants()


def test_freeing_gives_every_block_back():
    manager = BlockManager(4, 4)
    sequence = make_sequence(0, 9)
    manager.admit(sequence)
    compute(manager, sequence)

    manager.free(sequence)

    assert (manager.num_free_blocks, manager.num_idle_blocks) == (4, 2)
    assert sequence.block_table == []
    assert sequence.num_computed_tokens == 0
    assert not manager.owners
    manager.check_invariants()


# Prefix cache: lookup


def test_a_later_sequence_shares_the_full_blocks_of_an_equal_prefix():
    manager = BlockManager(16, 4)
    first = make_sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    manager.admit(first)
    compute(manager, first)
    second = make_sequence(1, [1, 2, 3, 4, 5, 6, 7, 8, 50, 51])

    manager.admit(second)

    assert first.block_table == [0, 1, 2]
    assert second.block_table[:2] == [0, 1]
    assert second.block_table[2] not in first.block_table
    assert second.num_computed_tokens == 8
    assert manager.num_free_blocks == 16 - 4
    manager.check_invariants()


@pytest.mark.parametrize(
    ("prompt", "num_hit"),
    [
        pytest.param([1, 2, 3, 4, 5, 6, 7, 8, 9], 8, id="one token past the blocks"),
        pytest.param([1, 2, 3, 4, 5, 6, 7, 8], 4, id="exactly the blocks: the last is left out"),
        pytest.param([1, 2, 3, 4, 5, 6, 7], 4, id="inside the second block"),
        pytest.param([1, 2, 3, 4], 0, id="exactly one block"),
        pytest.param([1, 2, 3, 4, 5, 6, 7, 0, 9], 4, id="another token in the second block"),
        pytest.param([0, 2, 3, 4, 5, 6, 7, 8, 9], 0, id="another first token"),
        pytest.param([5, 6, 7, 8, 9], 0, id="the second block's tokens at the start"),
    ],
)
def test_a_hit_is_the_longest_run_of_equal_blocks_without_the_last_token(prompt, num_hit):
    manager = BlockManager(16, 4)
    run_through(manager, make_sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]))
    sequence = make_sequence(1, prompt)

    manager.admit(sequence)

    assert sequence.num_computed_tokens == num_hit
    assert sequence.block_table[: num_hit // 4] == [0, 1][: num_hit // 4]
    manager.check_invariants()


def test_blocks_that_are_not_computed_yet_are_not_found():
    manager = BlockManager(16, 4)
    first = make_sequence(0, range(9))
    manager.admit(first)
    first.num_computed_tokens = 7
    manager.cache_full_blocks(first, first.num_computed_tokens)
    second = make_sequence(1, range(9))

    manager.admit(second)

    assert second.num_computed_tokens == 4
    manager.check_invariants()


def test_generated_tokens_are_found_like_prompt_tokens():
    manager = BlockManager(16, 4)
    first = make_sequence(0, [1, 2, 3])
    manager.admit(first)
    for token_id in (4, 5, 6, 7, 8, 9):
        first.append(token_id)
    manager.grow(first, 9)
    compute(manager, first)
    manager.free(first)
    second = make_sequence(1, [1, 2, 3, 4, 5, 6, 7, 8, 9])

    manager.admit(second)

    assert second.num_computed_tokens == 8


def test_sequences_share_only_within_their_salt():
    manager = BlockManager(32, 4)
    run_through(manager, make_sequence(0, range(9)))
    run_through(manager, make_sequence(1, range(9), salt="a"))
    hits = {}
    for request_id, salt in ((2, None), (3, "a"), (4, "b")):
        sequence = make_sequence(request_id, range(9), salt=salt)
        manager.admit(sequence)
        hits[salt] = sequence.block_table[: sequence.num_computed_tokens // 4]
        manager.check_invariants()

    assert hits == {None: [0, 1], "a": [2, 3], "b": []}


def test_a_sequence_with_prompt_logprobs_gets_no_cached_blocks():
    manager = BlockManager(16, 4)
    run_through(manager, make_sequence(0, range(9)))
    sequence = make_sequence(1, range(9), prompt_logprobs=True)

    manager.admit(sequence)

    assert sequence.num_computed_tokens == 0
    assert not manager.looks_up(sequence)


def test_without_prefix_caching_nothing_is_shared_and_nothing_stays_idle():
    manager = BlockManager(16, 4, enable_prefix_caching=False)
    run_through(manager, make_sequence(0, range(9)))
    sequence = make_sequence(1, range(9))

    manager.admit(sequence)

    assert sequence.num_computed_tokens == 0
    assert manager.num_idle_blocks == 0
    assert not manager.looks_up(sequence)


def test_a_shared_block_is_freed_with_its_last_owner():
    manager = BlockManager(8, 4)
    first, second = make_sequence(0, range(5)), make_sequence(1, range(6))
    manager.admit(first)
    compute(manager, first)
    manager.admit(second)

    manager.free(first)
    assert manager.num_free_blocks == 8 - 2
    manager.check_invariants()
    manager.free(second)
    assert manager.num_free_blocks == 8
    manager.check_invariants()


def test_a_hit_on_an_idle_block_counts_as_an_allocated_block():
    manager = BlockManager(3, 4)
    run_through(manager, make_sequence(0, range(9)))
    sequence = make_sequence(1, [*range(8), 50, 51, 52, 53])

    assert not manager.admit(sequence)

    assert manager.num_idle_blocks == 2
    manager.check_invariants()


def test_a_hit_on_an_owned_block_needs_no_free_block():
    manager = BlockManager(4, 4)
    first = make_sequence(0, range(9))
    manager.admit(first)
    compute(manager, first)

    assert manager.admit(make_sequence(1, [*range(8), 50]))
    assert manager.num_free_blocks == 0
    manager.check_invariants()


def test_equal_tokens_after_different_prefixes_do_not_share_a_block():
    manager = BlockManager(16, 2)
    run_through(manager, make_sequence(0, [1, 1, 7, 7, 9]))
    run_through(manager, make_sequence(1, [2, 2, 7, 7, 9]))
    first, second = make_sequence(2, [1, 1, 7, 7, 0]), make_sequence(3, [2, 2, 7, 7, 0])

    manager.admit(first)
    manager.admit(second)

    assert first.num_computed_tokens == second.num_computed_tokens == 4
    assert set(first.block_table).isdisjoint(second.block_table)


def test_hash_collisions_cause_no_false_hits():
    class Colliding(int):
        def __hash__(self):
            return 1

    manager = BlockManager(32, 2)
    prompts = [[a, b, c, d, 9] for a in (1, 2) for b in (1, 2) for c in (1, 2) for d in (1, 2)]
    for request_id, prompt in enumerate(prompts):
        sequence = make_sequence(request_id, map(Colliding, prompt))
        assert manager.admit(sequence)
        twins = [p for p in prompts[:request_id] if p[:2] == prompt[:2]]
        assert sequence.num_computed_tokens == (2 if twins else 0)
        compute(manager, sequence)
        manager.free(sequence)


# Prefix cache: contents and eviction


def test_the_first_of_two_equal_owned_blocks_stays_in_the_cache():
    manager = BlockManager(16, 4)
    first, second = make_sequence(0, range(5)), make_sequence(1, range(5))
    manager.admit(first)
    manager.admit(second)
    compute(manager, first)
    compute(manager, second)
    third = make_sequence(2, range(5))

    manager.admit(third)

    assert third.block_table[0] == first.block_table[0] != second.block_table[0]
    manager.free(second)
    assert manager.num_idle_blocks == 0
    manager.check_invariants()


def test_an_owned_block_replaces_an_equal_idle_one_and_later_blocks_are_still_found():
    manager = BlockManager(16, 4)
    run_through(manager, make_sequence(0, range(9)))
    # A prompt of exactly two blocks computes its second block anew.
    second = make_sequence(1, range(8))
    manager.admit(second)
    fresh = second.block_table[1]
    compute(manager, second)
    third = make_sequence(2, range(9))

    manager.admit(third)

    assert third.block_table[:2] == [0, fresh]
    assert manager.num_idle_blocks == 0
    manager.check_invariants()


def test_a_longer_prefix_is_found_after_a_block_was_replaced():
    manager = BlockManager(16, 2)
    run_through(manager, make_sequence(0, [1, 1, 2, 2, 3, 3, 4]))
    run_through(manager, make_sequence(1, [1, 1, 2, 2]))
    sequence = make_sequence(2, [1, 1, 2, 2, 3, 3, 5])

    manager.admit(sequence)

    assert sequence.num_computed_tokens == 6


def test_an_empty_block_is_used_before_an_idle_one():
    manager = BlockManager(5, 4)
    table = run_through(manager, make_sequence(0, range(9)))
    assert table == [0, 1, 2]

    other = make_sequence(1, 11)
    manager.admit(other)

    assert sorted(other.block_table) == [2, 3, 4]
    assert manager.num_idle_blocks == 2
    manager.check_invariants()


def test_the_tail_of_a_sequence_is_evicted_before_its_head():
    manager = BlockManager(6, 4)
    assert run_through(manager, make_sequence(0, range(13))) == [0, 1, 2, 3]
    filler = fill_all_empty_blocks(manager, 1)
    evicted = []

    for num_blocks in range(len(filler.block_table) + 1, 7):
        manager.grow(filler, 4 * num_blocks)
        evicted.append(filler.block_table[-1])
        manager.check_invariants()

    assert evicted == [2, 1, 0]


def test_the_sequence_freed_first_is_evicted_first():
    manager = BlockManager(6, 4)
    first, second = make_sequence(0, range(7)), make_sequence(1, range(50, 57))
    manager.admit(first)
    manager.admit(second)
    compute(manager, first)
    compute(manager, second)
    tables = first.block_table, second.block_table
    manager.free(second)
    manager.free(first)
    filler = fill_all_empty_blocks(manager, 2)

    manager.grow(filler, 4 * 5)
    assert filler.block_table[-1] == tables[1][0]
    manager.grow(filler, 4 * 6)
    assert filler.block_table[-1] == tables[0][0]


def test_a_hit_makes_a_block_the_last_to_be_evicted():
    manager = BlockManager(6, 4)
    tables = [run_through(manager, make_sequence(i, range(50 * i, 50 * i + 7))) for i in range(2)]
    run_through(manager, make_sequence(2, range(7)))
    filler = fill_all_empty_blocks(manager, 3)

    manager.grow(filler, 4 * 5)

    assert filler.block_table[-1] == tables[1][0]
    assert manager.admit(make_sequence(4, range(3))) is True


def test_an_evicted_block_is_not_found():
    manager = BlockManager(2, 4)
    run_through(manager, make_sequence(0, range(5)))
    run_through(manager, make_sequence(1, range(50, 57)))
    sequence = make_sequence(2, range(5))

    manager.admit(sequence)

    assert sequence.num_computed_tokens == 0
    manager.check_invariants()


def test_discarding_a_sequence_removes_its_blocks_from_the_cache():
    manager = BlockManager(8, 4)
    sequence = make_sequence(0, range(9))
    manager.admit(sequence)
    compute(manager, sequence)

    manager.free(sequence, discard_cached=True)

    assert manager.num_idle_blocks == 0
    assert manager.num_free_blocks == 8
    manager.check_invariants()


def test_a_discarded_block_stays_with_its_other_owner_but_leaves_the_cache():
    manager = BlockManager(12, 4)
    first, second, third = (make_sequence(i, range(9)) for i in range(3))
    manager.admit(first)
    compute(manager, first)
    manager.admit(second)
    shared = second.block_table[:2]

    manager.free(first, discard_cached=True)
    manager.check_invariants()
    assert second.block_table[:2] == shared
    compute(manager, second)
    manager.admit(third)

    assert third.num_computed_tokens == 0
    manager.free(second)
    assert manager.num_idle_blocks == 0
    manager.check_invariants()


# Placement


def test_a_sequence_grows_into_the_block_after_its_last_one():
    manager = BlockManager(64, 4)
    sequence = make_sequence(0, 7)
    manager.admit(sequence)

    for num_tokens in range(8, 60):
        manager.grow(sequence, num_tokens)

    assert sequence.block_table == list(range(15))


def test_a_new_run_leaves_space_for_the_sequence_before_it_to_grow():
    manager = BlockManager(64, 4)
    first, second, third = (make_sequence(i, 15) for i in range(3))

    for sequence in (first, second, third):
        manager.admit(sequence)

    assert first.block_table == [0, 1, 2, 3]
    assert second.block_table == [32, 33, 34, 35]  # 4 + (60 - 4) / 2
    assert third.block_table == [16, 17, 18, 19]  # 4 + (28 - 4) / 2


def test_a_new_run_starts_at_the_edge_if_no_sequence_grows_into_the_stretch():
    manager = BlockManager(64, 4)
    run_through(manager, make_sequence(0, 32))
    sequence = make_sequence(1, 15)

    manager.admit(sequence)

    assert sequence.block_table == [8, 9, 10, 11]


def test_sequences_that_grow_alternately_do_not_interleave():
    manager = BlockManager(64, 4)
    sequences = [make_sequence(i, 3) for i in range(4)]
    for sequence in sequences:
        manager.admit(sequence)

    for num_tokens in range(4, 32):
        for sequence in sequences:
            assert manager.grow(sequence, num_tokens)

    for sequence in sequences:
        start = sequence.block_table[0]
        assert sequence.block_table == list(range(start, start + 8))
    manager.check_invariants()


def test_a_run_that_reaches_an_owned_block_continues_in_the_largest_stretch():
    manager = BlockManager(16, 4)
    first, second = make_sequence(0, 3), make_sequence(1, 3)
    manager.admit(first)
    manager.admit(second)
    assert second.block_table == [8]

    manager.grow(first, 4 * 9)

    assert first.block_table == [0, 1, 2, 3, 4, 5, 6, 7, 12]
    manager.check_invariants()


def test_a_prompt_longer_than_any_stretch_is_split_over_several():
    manager = BlockManager(8, 4)
    holders = [make_sequence(i, 3) for i in range(8)]
    for holder in holders:
        manager.admit(holder)
    for holder in holders:
        if holder.block_table[0] in (0, 1, 4, 5, 6):
            manager.free(holder)
    sequence = make_sequence(9, 19)

    assert manager.admit(sequence)

    assert sequence.block_table == [0, 1, 4, 5, 6]
    manager.check_invariants()


def test_evicted_blocks_are_used_in_order_of_their_ids():
    manager = BlockManager(8, 4)
    run_through(manager, make_sequence(0, range(31)))
    sequence = make_sequence(1, 31)

    manager.admit(sequence)

    assert sequence.block_table == [0, 1, 2, 3, 4, 5, 6, 7]
    manager.check_invariants()


@pytest.mark.parametrize(
    ("reserve", "table", "num_idle"),
    [
        pytest.param(0.0, [14, 15, 3, 4], 11, id="none: evict only what is needed"),
        pytest.param(0.5, [1, 2, 3, 4], 9, id="half the pool: evict until it fits in one run"),
        pytest.param(0.32, [14, 15, 2, 3], 10, id="five blocks: evict while fewer are empty"),
    ],
)
def test_a_contiguity_reserve_trades_cached_blocks_for_longer_runs(reserve, table, num_idle):
    manager = BlockManager(16, 4, contiguity_reserve=reserve)
    assert run_through(manager, make_sequence(0, 20)) == [0, 1, 2, 3, 4, 5]
    held = make_sequence(1, 3)
    manager.admit(held)
    assert held.block_table == [5]
    assert run_through(manager, make_sequence(2, 35)) == [6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert manager.num_idle_blocks == 13
    sequence = make_sequence(3, 15)

    manager.admit(sequence)

    assert sequence.block_table == table
    assert manager.num_idle_blocks == num_idle
    manager.check_invariants()
