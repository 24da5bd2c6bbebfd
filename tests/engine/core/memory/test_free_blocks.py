from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.engine.core.memory.free_blocks import FreeBlocks


def test_all_blocks_are_one_stretch_at_first():
    free = FreeBlocks(10)

    assert free.stretches == [(0, 10)]
    assert free.largest() == (0, 10)
    assert free.num_free == 10


@pytest.mark.parametrize(
    ("offset", "count", "left"),
    [
        pytest.param(0, 10, [], id="all"),
        pytest.param(0, 3, [(3, 10)], id="from the start"),
        pytest.param(7, 3, [(0, 7)], id="up to the end"),
        pytest.param(4, 2, [(0, 4), (6, 10)], id="from the middle"),
    ],
)
def test_taking_blocks_leaves_the_rest_of_the_stretch(offset, count, left):
    free = FreeBlocks(10)

    free.take(0, offset, count)

    assert free.stretches == left
    assert free.num_free == 10 - count
    free.check_invariants()


@pytest.mark.parametrize(
    ("taken", "released", "stretches"),
    [
        pytest.param((4, 3), 5, [(0, 4), (5, 6), (7, 10)], id="touching neither side"),
        pytest.param((4, 3), 4, [(0, 5), (7, 10)], id="touching the stretch before it"),
        pytest.param((4, 3), 6, [(0, 4), (6, 10)], id="touching the stretch after it"),
        pytest.param((4, 1), 4, [(0, 10)], id="closing the gap"),
    ],
)
def test_a_released_block_merges_with_adjacent_stretches(taken, released, stretches):
    free = FreeBlocks(10)
    free.take(0, *taken)

    free.release(released)

    assert free.stretches == stretches
    free.check_invariants()


def test_size_from_is_zero_except_at_the_start_of_a_stretch():
    free = FreeBlocks(10)
    free.take(0, 0, 4)

    assert [free.size_from(block) for block in (-1, 3, 4, 5, 10)] == [0, 0, 6, 0, 0]


class FreeBlocksMachine(RuleBasedStateMachine):
    """Compares with a plain set."""

    @initialize(num_blocks=st.integers(1, 40))
    def start(self, num_blocks):
        self.num_blocks = num_blocks
        self.free = FreeBlocks(num_blocks)
        self.model = set(range(num_blocks))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def take(self, data):
        start, stop = data.draw(st.sampled_from(self.free.stretches))
        offset = data.draw(st.integers(0, stop - start - 1))
        count = data.draw(st.integers(1, stop - start - offset))
        self.free.take(start, offset, count)
        self.model -= set(range(start + offset, start + offset + count))

    @precondition(lambda self: len(self.model) < self.num_blocks)
    @rule(data=st.data())
    def release(self, data):
        used = sorted(set(range(self.num_blocks)) - self.model)
        block = data.draw(st.sampled_from(used))
        self.free.release(block)
        self.model.add(block)

    @invariant()
    def agrees_with_the_set(self):
        self.free.check_invariants()
        stretches = self.free.stretches
        assert {b for start, stop in stretches for b in range(start, stop)} == self.model
        if stretches:
            start, stop = self.free.largest()
            assert 2 * (stop - start) > max(stop - start for start, stop in stretches)


TestFreeBlocksMachine = FreeBlocksMachine.TestCase
TestFreeBlocksMachine.settings = settings(max_examples=60, stateful_step_count=40)
