"""Decode with keys on the M dimension of its products: groups, launches and masks beside the tests of all rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.attention.launch import TunedLaunch
from kernels.attention.problem import Phase
from kernels.attention.registry import REGISTRY
from tests.gpu.attention_cases import (
    DEVICE,
    LONG_LENGTHS,
    RAGGED_LENGTHS,
    around_block_boundaries,
    attend,
    judge,
    make,
    make_problem,
    selection_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

ROW, OLD = (
    next(row for row in REGISTRY if row.name == name)
    for name in ("hopper_keys_on_m_decode", "hopper_decode")
)
FEATURES = [
    {"lse": True}, {"sliding_window": 1}, {"sliding_window": 64, "lse": True}, {"sliding_window": 300},
    {"softcap": 15.0, "lse": True}, {"softcap": 15.0, "sliding_window": 100},
]  # fmt: skip
LAUNCHES = [
    {"num_stages": 1}, {"num_stages": 3}, {"block_n": 64}, {"programs_per_sm": 1}, {"programs_per_sm": 12},
]  # fmt: skip


def problem_of(group, head_dim=64, dtype="bfloat16", block_size=16, kv_heads=3, **features):
    return make_problem(
        Phase.DECODE, (dtype, group * kv_heads, kv_heads, head_dim, block_size, features)
    )


def launched(problem, **changes):
    """Return a selection with a launch of which some fields are changed."""
    found = selection_of(ROW, problem)
    launch = dataclasses.replace(found.launches[-1].launch, **changes)
    return dataclasses.replace(found, launches=(TunedLaunch(launch, None, "test", measured=False),))


def check(problem, lengths, selection=None):
    case = make(problem, [1] * len(lengths), list(lengths))
    judge(case, *case.attend(selection or selection_of(ROW, problem)))


@pytest.mark.parametrize(
    ("group", "head_dim"), [*((group, 64) for group in range(1, 17)), (3, 128), (8, 128), (16, 128)]
)
def test_keys_on_m_agrees_for_every_group(group, head_dim):
    check(problem_of(group, head_dim, lse=True), RAGGED_LENGTHS)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize(("group", "dtype"), [(3, "bfloat16"), (12, "float16")])
def test_keys_on_m_agrees_with_masks(group, dtype, features):
    check(problem_of(group, dtype=dtype, **features), [0, *around_block_boundaries(16), 500, 1999])


@pytest.mark.parametrize("head_dim", [32, 48, 80, 96, 112])
def test_keys_on_m_agrees_for_padded_head_dims(head_dim):
    check(problem_of(4, head_dim, block_size=64, lse=True), RAGGED_LENGTHS)


@pytest.mark.parametrize("changes", LAUNCHES, ids=str)
@pytest.mark.parametrize("block_size", [16, 256])
def test_keys_on_m_agrees_for_every_launch(changes, block_size):
    problem = problem_of(3, block_size=block_size, lse=True)
    for lengths in (LONG_LENGTHS, RAGGED_LENGTHS, [184] * 256):
        check(problem, lengths, launched(problem, **changes))


@pytest.mark.parametrize("count", [1, 64, 256])
def test_keys_on_m_agrees_for_large_scores(count):
    problem = problem_of(3, lse=True)
    case = make(problem, [1] * count, [184] * count)
    case.q.mul_(30.0)
    judge(case, *case.attend(selection_of(ROW, problem)))


def test_keys_on_m_writes_nothing_but_the_output():
    problem = problem_of(5)
    case = make(problem, [1] * len(RAGGED_LENGTHS), RAGGED_LENGTHS)
    rows, heads, size = case.q.shape
    room = torch.full((rows + 16, heads, size), 7.0, dtype=case.q.dtype, device=DEVICE)
    out = room[8 : 8 + rows].fill_(float("nan"))

    attend(problem, case.batch, case.q, case.kv, selection_of(ROW, problem), out)

    assert bool(out.isfinite().all())
    assert bool((room[:8] == 7.0).all() & (room[8 + rows :] == 7.0).all())


@pytest.mark.parametrize("lengths", [RAGGED_LENGTHS, [16384, 1, 0], [184] * 256], ids=len)
def test_keys_on_m_replays_the_same_bits(lengths):
    problem = problem_of(3)
    case = make(problem, [1] * len(lengths), list(lengths))
    selection = selection_of(ROW, problem)
    expected = attend(problem, case.batch, case.q, case.kv, selection)
    plan = kernels.plan_attention(problem, case.batch, selection=selection)
    out = torch.empty_like(case.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.decode_attention(case.q, case.kv, plan, out)
    differences = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(200):
        out.fill_(float("nan"))
        graph.replay()
        differences += (out != expected).sum()

    assert int(differences) == 0


def test_keys_on_m_is_as_exact_as_queries_on_m(record_property):
    problem = problem_of(3)
    case = make(problem, [1] * len(RAGGED_LENGTHS), RAGGED_LENGTHS)
    truth = case.expected(torch.float64)
    errors = [
        float((case.attend(selection_of(row, problem))[0].double() - truth).abs().max())
        for row in (OLD, ROW)
    ]

    record_property(
        "proof", f"largest error with queries on M {errors[0]:.2e}, with keys {errors[1]:.2e}"
    )
    assert errors[1] <= 1.5 * errors[0]
