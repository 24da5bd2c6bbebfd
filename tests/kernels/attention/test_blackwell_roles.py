"""The warp roles of the Blackwell prefill wait for each other in the right places, in any order of events."""

from __future__ import annotations

import random

import pytest

from tests.kernels.attention.blackwell_roles import Item, Kernel
from tests.kernels.attention.warp_roles import Barrier, RoleError

ORDERS = 150
"""Random orders of events for each ring."""


def some_items(seed):
    """Return items of a few tiles, as causal masks, windows and the ends of sequences make them."""
    rng = random.Random(seed)
    items = []
    for _ in range(rng.randrange(1, 7)):
        count = rng.choice([0, 1, 1, 2, 3, 5])
        mine = []
        for group in range(2):
            # The first group may see fewer of the last keys; the second fewer of the first ones, or none at all.
            passed = rng.randrange(2) if group == 0 and count > 1 else 0
            left = rng.randrange(2) if group == 1 and count > 1 else 0
            mine.append((passed, count - passed - left))
        if rng.random() < 0.3:
            mine = [(0, count), (0, 0)]
        elif rng.random() < 0.1:
            mine = [(0, 0), (0, count)]
        items.append(Item(count, *zip(*mine, strict=True)))
    return items


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_role_reads_or_overwrites_too_early_or_waits_for_ever(stages):
    for seed in range(ORDERS):
        items = some_items(seed)
        kernel = Kernel(items, stages, seed)

        kernel.run()

        assert sorted(kernel.finished) == [(i, g) for i in range(len(items)) for g in range(2)]


def orders_with_faults(**changes):
    found = 0
    for seed in range(ORDERS):
        kernel = Kernel(some_items(seed), 2, seed, **changes)
        try:
            kernel.run()
        except RoleError:
            found += 1
    return found


def test_a_slot_that_is_freed_too_early_or_never_is_found():
    assert orders_with_faults(item_readers=2)
    assert orders_with_faults(item_readers=4)


class Released(Barrier):
    """A barrier that nobody has to wait for."""

    def is_complete(self, number):
        return True


@pytest.mark.parametrize("ring", ["k_empty", "v_empty", "p_full", "s_full", "k_full", "v_full", "o_full"])  # fmt: skip
def test_a_missing_wait_is_found(ring):
    found = 0
    for seed in range(ORDERS):
        kernel = Kernel(some_items(seed), 2, seed)
        setattr(kernel, ring, [Released(1) for _ in range(2)])
        try:
            kernel.run()
        except RoleError:
            found += 1

    assert found


@pytest.mark.parametrize("ring", ["q_full", "q_empty"])
def test_a_missing_wait_for_queries_is_found(ring):
    found = 0
    for seed in range(ORDERS):
        kernel = Kernel(some_items(seed), 2, seed)
        setattr(kernel, ring, Released(1))
        try:
            kernel.run()
        except RoleError:
            found += 1

    assert found
