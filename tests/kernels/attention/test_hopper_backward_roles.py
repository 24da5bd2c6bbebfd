"""The warp roles of Hopper's one-pass backward wait for each other in the right places, in any order of events."""

from __future__ import annotations

import random

import pytest

from tests.kernels.attention.hopper_backward_roles import BackwardBlock, Use
from tests.kernels.attention.warp_roles import RoleError

ORDERS = 60
"""Random orders of events for each ring."""


def some_uses(seed):
    """Return the tiles of a few heads; the last one of a sequence may be partial."""
    rng = random.Random(seed)
    heads, tiles, is_partial = rng.choice([1, 1, 2, 4]), rng.randrange(5), rng.random() < 0.5
    return [
        Use(is_partial and tile == tiles - 1 and rng.random() < 0.8)
        for tile in range(tiles)
        for _ in range(heads)
    ]


def faults(stages, **changes):
    found = 0
    for seed in range(ORDERS):
        try:
            BackwardBlock(some_uses(seed), stages, seed, **changes).run()
        except RoleError:
            found += 1
    return found


@pytest.mark.parametrize("stages", [2, 3])
def test_no_role_reads_or_overwrites_too_early_or_waits_for_ever(stages):
    for seed in range(ORDERS):
        BackwardBlock(some_uses(seed), stages, seed).run()


def test_one_stage_would_wait_for_ever():
    assert faults(1)


@pytest.mark.parametrize(
    "name",
    ["k_full", "v_full", "q_full", "do_full", "released", "drain", "before dS", "after dS", "end"],
)
def test_a_missing_wait_is_found(name):
    assert faults(2, without=frozenset({name}))
