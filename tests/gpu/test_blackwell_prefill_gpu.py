"""Blackwell prefill on the GPU: the edge cases of its tiles, in addition to the tests of all rows.

No GPU of its compute capabilities was at hand when it was written; these are the first tests to run on one.
"""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.attention.problem import Phase
from kernels.attention.registry import REGISTRY
from tests.gpu.attention_cases import (
    DEVICE,
    LONG_PAIRS,
    SHORT_PAIRS,
    around_block_boundaries,
    judge,
    make,
    make_problem,
    named,
    selection_of,
)

ROW = next(row for row in REGISTRY if row.name == "blackwell_prefill")
# dtype, query heads, key-value heads, head dim, block size, features.
COMBINATIONS = [
    ("bfloat16", 8, 8, 64, 16, {"lse": True}),
    ("bfloat16", 8, 2, 128, 16, {}),
    ("float16", 8, 2, 64, 128, {"softcap": 15.0, "sliding_window": 300}),
    ("float16", 8, 4, 128, 256, {"sliding_window": 1, "lse": True}),
    ("bfloat16", 6, 2, 128, 64, {"sliding_window": 200}),
    ("bfloat16", 14, 2, 64, 32, {"causal": False}),
    ("bfloat16", 64, 1, 128, 16, {"lse": True}),
    ("bfloat16", 8, 2, 128, None, {"causal": False, "lse": True}),
    ("float16", 5, 1, 64, None, {"sliding_window": 129}),
]


def check(combination, query_lens, seq_lens, size=1.0):
    problem = make_problem(Phase.PREFILL, combination)
    selection = selection_of(ROW, problem)
    case = make(problem, list(query_lens), list(seq_lens))
    case.q.mul_(size)
    judge(case, *case.attend(selection))


@pytest.mark.parametrize("combination", named(COMBINATIONS))
def test_it_agrees_over_ragged_queries_and_keys(combination):
    check(combination, *zip(*SHORT_PAIRS, strict=True))


@pytest.mark.parametrize("combination", named(COMBINATIONS[:5]))
def test_it_agrees_over_long_and_short_sequences(combination):
    check(combination, *zip(*LONG_PAIRS, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_it_agrees_around_block_and_tile_boundaries(head_dim, group):
    lengths = [*around_block_boundaries(16), 127, 128, 129, 255, 256, 257, 511, 512, 513]
    check(("bfloat16", 4 * group, 4, head_dim, 16, {}), lengths, lengths)


@pytest.mark.parametrize("size", [4.0, 12.0])
def test_it_agrees_where_outputs_are_rescaled_often(size):
    check(("bfloat16", 8, 2, 128, 16, {"lse": True}), [500, 100], [1500, 2000], size)


def test_its_work_counter_is_reset_for_the_next_layer():
    problem = make_problem(Phase.PREFILL, COMBINATIONS[1])
    selection = selection_of(ROW, problem)
    case = make(problem, [300] * 40, [700] * 40)
    plan = kernels.plan_attention(problem, case.batch, selection=selection)
    outs = [torch.full_like(case.q, float("nan"), device=DEVICE) for _ in range(3)]
    for out in outs:
        kernels.prefill_attention(case.q, case.kv, plan, out)

    judge(case, outs[0])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
