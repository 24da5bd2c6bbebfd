"""Cascade decode: accuracy, determinism and CUDA graph capture."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.attention.problem import Phase
from tests.gpu.attention_cases import (
    COMBINATIONS,
    DEVICE,
    SEVERAL_QUERIES_COMBINATIONS,
    attend,
    judge,
    make,
    make_problem,
    named,
    rows,
    selection_of,
)
from tests.kernels.references.problems import UNUSED_BLOCK

DECODE = pytest.mark.parametrize("row", rows(Phase.DECODE))
WITHOUT_WINDOW = [it for it in COMBINATIONS if "sliding_window" not in it[5]]
REPEATS = 300


def shared_case(combination, query_lens, own_lens, blocks, **options):
    """Return a case of sequences with `blocks` shared blocks and their own tokens; `own` 0 makes an empty sequence."""
    prefix = blocks * combination[4]
    lengths = [prefix + own if own else 0 for own in own_lens]
    problem = make_problem(Phase.DECODE, combination)
    return make(problem, query_lens, lengths, shared_prefix=prefix, **options)


def selection_for(row, case):
    """Select `row`; skip the test if it cannot be part of a cascade."""
    selection = selection_of(row, case.problem)
    plan = kernels.plan_attention(case.problem, case.batch, selection=selection)
    if plan.prefix is None:
        assert row.name != "portable_decode"
        pytest.skip(f"{row.name} writes no log-sum-exp")
    return selection


def without_hint(case):
    return dataclasses.replace(case, batch=dataclasses.replace(case.batch, shared_prefix=0))


@DECODE
@pytest.mark.parametrize("combination", named(WITHOUT_WINDOW))
def test_own_tokens_of_every_length_after_a_shared_prefix_agree(row, combination):
    own = [1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 255, 257, 700, 1024, 0, 3]
    case = shared_case(combination, [1] * len(own), own, 11)

    judge(case, *case.attend(selection_for(row, case)))


@DECODE
@pytest.mark.parametrize("combination", named([WITHOUT_WINDOW[0], WITHOUT_WINDOW[1]]))
@pytest.mark.parametrize("blocks", [1, 4, 5, 64, 515])
@pytest.mark.parametrize("count", [1, 2, 64, 300])
def test_prefixes_of_every_length_and_batches_of_every_size_agree(row, combination, blocks, count):
    own = [1 + 37 * index % 90 for index in range(count)]
    case = shared_case(combination, [1] * count, own, blocks)

    judge(case, *case.attend(selection_for(row, case)))


@DECODE
@pytest.mark.parametrize(
    "combination",
    named([it for it in SEVERAL_QUERIES_COMBINATIONS if "sliding_window" not in it[5]]),
)
def test_several_queries_per_sequence_after_a_shared_prefix_agree(row, combination):
    most = combination[5]["max_query_tokens"]
    queries = [most, 1, 2, 0, most, most - 1, 1, most]
    case = shared_case(combination, queries, [most, 1, 3, 9, 100, 513, 16, 2049], 20)

    judge(case, *case.attend(selection_for(row, case)))


@DECODE
def test_shared_blocks_are_read_from_the_first_row_of_the_block_table_only(row):
    case = shared_case(COMBINATIONS[2], [1] * 5, [1, 20, 300, 17, 90], 12)
    case.batch.block_table[1:, :12] = UNUSED_BLOCK

    judge(case, *case.attend(selection_for(row, case)))


@DECODE
def test_sequences_without_tokens_give_zeros_and_a_log_sum_exp_of_minus_infinity(row):
    case = shared_case(COMBINATIONS[2], [1] * 4, [5, 0, 90, 0], 12)

    out, lse = case.attend(selection_for(row, case))

    assert not bool(out[[1, 3]].any())
    assert bool((lse[[1, 3]] == float("-inf")).all())
    judge(case, out, lse)


@DECODE
def test_padding_rows_are_not_written(row):
    case = shared_case(COMBINATIONS[2], [1] * 3, [5, 40, 90], 12)
    selection = selection_for(row, case)
    padded = dataclasses.replace(case.batch, num_tokens=70, max_seqlen_k=4096)
    q = torch.full((70, 8, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    q[:3] = case.q
    out, lse = torch.full_like(q, 7.0), torch.full((70, 8), 7.0, device=DEVICE)
    plan = kernels.plan_attention(case.problem, padded, selection=selection)

    kernels.decode_attention(q, case.kv, plan, out, lse)

    judge(case, out[:3], lse[:3])
    assert bool((out[3:] == 7.0).all())
    assert bool((lse[3:] == 7.0).all())


@DECODE
def test_repeats_give_the_same_bits(row):
    case = shared_case(COMBINATIONS[0], [1] * 64, [1 + 7 * index for index in range(64)], 200)
    selection = selection_for(row, case)
    first = attend(case.problem, case.batch, case.q, case.kv, selection)
    plan = kernels.plan_attention(case.problem, case.batch, selection=selection)
    differences = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPEATS):
        out = torch.full_like(case.q, float("nan"))
        kernels.decode_attention(case.q, case.kv, plan, out)
        differences += (out != first).sum()

    assert int(differences) == 0


@DECODE
@pytest.mark.parametrize("plan_inside", [False, True], ids=["planned before", "planned inside"])
def test_a_replayed_step_reads_changed_queries_and_lengths(row, plan_inside):
    case = shared_case(COMBINATIONS[0], [1] * 6, [600, 1, 300, 2, 90, 400], 30)
    selection = selection_for(row, case)
    attend(case.problem, case.batch, case.q, case.kv, selection)  # compiles
    out = torch.full_like(case.q, float("nan"))
    plan = kernels.plan_attention(case.problem, case.batch, selection=selection)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if plan_inside:
            plan = kernels.plan_attention(case.problem, case.batch, selection=selection)
        kernels.decode_attention(case.q, case.kv, plan, out)
    for step in range(3):
        case.q.copy_(case.q.roll(1, 0))
        if plan_inside:
            # Sequences become shorter, and one becomes empty.
            case.batch.seq_lens[2:] -= 1
            case.batch.seq_lens[5] *= step < 2
        out.fill_(float("nan"))

        graph.replay()

        eager = attend(case.problem, case.batch, case.q, case.kv, selection)
        assert torch.equal(out, eager)


@DECODE
def test_a_problem_without_cascade_support_ignores_shared_prefix(row):
    combination = (*COMBINATIONS[0][:5], {"sliding_window": 100})
    case = shared_case(combination, [1] * 5, [1, 20, 300, 17, 90], 12)
    selection = selection_of(row, case.problem)
    plan = kernels.plan_attention(case.problem, case.batch, selection=selection)

    assert plan.prefix is None
    assert torch.equal(case.attend(selection)[0], without_hint(case).attend(selection)[0])


def test_the_default_selection_uses_the_cascade():
    if kernels.detect(DEVICE).sm < 80:
        pytest.skip("no row reads a prefix once before sm_80")
    case = shared_case(COMBINATIONS[2], [1] * 20, [1 + index for index in range(20)], 12)

    plan = kernels.plan_attention(case.problem, case.batch)

    assert plan.prefix is not None
    judge(case, *case.attend())
