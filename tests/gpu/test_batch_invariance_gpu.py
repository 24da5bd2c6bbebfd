"""Batch-invariant attention returns the same bits for a query alone, in any batch, and in both phases."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import kernels
from kernels.attention.problem import Phase
from kernels.attention.registry import INVARIANT_REGISTRY
from tests.gpu.attention_cases import (
    attend,
    make,
    make_problem,
    one_sequence,
    selection_of,
)

INVARIANT = [pytest.param(row, id=row.name) for row in INVARIANT_REGISTRY]
PREFILL = [row for row in INVARIANT if row.values[0].phase is Phase.PREFILL]
BOTH = pytest.mark.parametrize("row", INVARIANT)
NEIGHBOURS = (2, 17, 256)
LONG = 5000
"""Tokens of the sequence whose bits are compared: more than two splits of a fixed length."""
EDGES = (0, 1, 63, 64, 127, 128, 511, 512, 513, 1023, 1024, 1025, 1500, 2047, 2048, 3000, LONG - 1)
"""Tokens at the edges of tiles and parts."""
COMBINATIONS = [
    ("bfloat16", 8, 2, 128, 16, {}),
    ("float16", 7, 1, 64, 48, {}),
    ("bfloat16", 8, 1, 64, 32, {"sliding_window": 1500}),
    ("bfloat16", 6, 2, 80, 16, {"sliding_window": 3000}),
    ("bfloat16", 8, 1, 256, 64, {"softcap": 15.0}),
    ("float32", 8, 2, 96, 16, {}),
    ("bfloat16", 16, 8, 128, 16, {}),
    ("bfloat16", 9, 3, 64, 16, {}),
    ("float16", 14, 2, 64, 16, {}),
    ("bfloat16", 32, 8, 128, 16, {"sliding_window": 700, "softcap": 30.0}),
    ("float16", 4, 1, 256, 16, {"sliding_window": 1100}),
    ("bfloat16", 4, 1, 256, 16, {}),
    ("bfloat16", 6, 2, 64, 16, {"softcap": 15.0}),
    ("bfloat16", 2, 2, 32, 16, {"sliding_window": 1}),
]
PAIRS = [
    pytest.param((prefill, decode), id=prefill.name.removesuffix("_prefill"))
    for prefill, decode in zip(INVARIANT_REGISTRY[::2], INVARIANT_REGISTRY[1::2], strict=True)
]
"""The rows of both phases of each kernel."""


def invariant_problem(phase, combination, **more):
    *shape, features = combination
    return make_problem(phase, (*shape, {**features, **more, "batch_invariant": True}))


def named(combinations):
    return [pytest.param(it, id="-".join(map(str, (*it[:5], *it[5])))) for it in combinations]


def neighbours(rng, phase, count):
    """Return query and sequence lengths of `count` random sequences."""
    most = 1 if phase is Phase.DECODE else 400
    queries = [rng.randint(1, most) for _ in range(count)]
    longest = 9000 if count < 100 else 1500
    lengths = [rng.randint(least, longest) for least in queries]
    return queries, lengths


def among(row, problem, kept_queries, count, seed):
    """Return a sequence's output in a batch of `count`, and its output alone over the same cache."""
    rng = random.Random(seed)
    queries, lengths = neighbours(rng, row.phase, count - 1)
    index = rng.randrange(count)
    queries.insert(index, kept_queries)
    lengths.insert(index, LONG)
    case = make(problem, queries, lengths, seed=seed)
    selection = selection_of(row, problem)
    together = attend(problem, case.batch, case.q, case.kv, selection)
    batch, q = one_sequence(case, index)
    first = sum(queries[:index])
    alone = attend(problem, batch, q, case.kv, selection)
    return together[first : first + kept_queries], alone


@BOTH
@pytest.mark.parametrize("count", NEIGHBOURS)
@pytest.mark.parametrize("combination", named(COMBINATIONS))
def test_a_sequence_has_the_same_bits_alone_and_among_random_neighbours(row, combination, count):
    problem = invariant_problem(row.phase, combination)
    kept = 1 if row.phase is Phase.DECODE else 130

    together, alone = among(row, problem, kept, count, seed=count)

    assert torch.equal(together, alone)


@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_the_batch_and_the_number_of_queries_change_no_bit(row, seed):
    problem = invariant_problem(row.phase, COMBINATIONS[0])
    kept = 1 if row.phase is Phase.DECODE else (1, 3, 127, 129, 300, 1500)[seed]

    together, alone = among(row, problem, kept, 2 + 9 * seed, seed=100 + seed)

    assert torch.equal(together, alone)


@pytest.mark.parametrize("row", PREFILL)
@pytest.mark.parametrize("combination", named(COMBINATIONS))
@pytest.mark.parametrize("chunk", [128, 512, 1000])
def test_a_chunk_of_a_prompt_has_the_same_bits_alone_and_in_a_batch(row, combination, chunk):
    problem = invariant_problem(Phase.PREFILL, combination)
    selection = selection_of(row, problem)
    rng = random.Random(chunk)
    queries, lengths = neighbours(rng, Phase.PREFILL, 16)
    case = make(problem, [2500, *queries], [2500, *lengths], seed=chunk)
    whole_batch, q = one_sequence(case, 0)
    for start in range(0, 2500, chunk):
        stop = min(start + chunk, 2500)
        alone_batch = part_of(whole_batch, stop - start, stop)
        alone = attend(problem, alone_batch, q[start:stop], case.kv, selection)
        beside, rows_of_chunk = beside_others(case, start, stop)
        together = attend(problem, beside, rows_of_chunk, case.kv, selection)

        assert torch.equal(together[: stop - start], alone), f"tokens {start} to {stop}"


@pytest.mark.parametrize("row", PREFILL)
def test_a_whole_prompt_has_the_same_bits_among_neighbours(row):
    problem = invariant_problem(Phase.PREFILL, COMBINATIONS[0])

    for count in NEIGHBOURS:
        together, alone = among(row, problem, LONG, count, seed=7 * count)
        assert torch.equal(together, alone)


def part_of(batch, queries, length):
    """Truncate a batch of one sequence to `length` tokens, the last `queries` of which are the queries."""
    return dataclasses.replace(
        batch,
        cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32, device=batch.seq_lens.device),
        seq_lens=torch.tensor([length], dtype=torch.int32, device=batch.seq_lens.device),
        num_tokens=queries,
        max_seqlen_q=queries,
        max_seqlen_k=length,
    )


def beside_others(case, start, stop):
    """Return the batch of a case and its queries, with only tokens start to stop of the first sequence as queries."""
    whole = case.query_lens[0]
    lengths = case.batch.seq_lens.clone()
    lengths[0] = stop
    starts = case.batch.cu_seqlens_q - (whole - (stop - start))
    starts[0] = 0
    batch = dataclasses.replace(
        case.batch,
        cu_seqlens_q=starts,
        seq_lens=lengths,
        num_tokens=case.batch.num_tokens - whole + stop - start,
        max_seqlen_q=max(stop - start, *case.query_lens[1:]),
        max_seqlen_k=max(stop, *case.seq_lens[1:]),
    )
    return batch, torch.cat((case.q[start:stop], case.q[whole:]))


@BOTH
def test_loose_bounds_of_the_lengths_change_no_bit(row):
    problem = invariant_problem(row.phase, COMBINATIONS[0])
    queries = [1] * 4 if row.phase is Phase.DECODE else [40, 3, 130, 90]
    case = make(problem, queries, [LONG, 100, 2049, 777])
    selection = selection_of(row, problem)
    most = case.batch.max_seqlen_q if row.phase is Phase.DECODE else 4096
    loose = dataclasses.replace(case.batch, max_seqlen_q=most, max_seqlen_k=65536)

    tight = attend(problem, case.batch, case.q, case.kv, selection)

    assert torch.equal(attend(problem, loose, case.q, case.kv, selection), tight)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("combination", named(COMBINATIONS))
def test_a_decoded_token_has_the_bits_that_the_whole_prompt_gives_it(pair, combination):
    asked = invariant_problem(Phase.PREFILL, combination)
    decode = dataclasses.replace(asked, phase=Phase.DECODE)
    prefill_row, decode_row = pair
    case = make(asked, [LONG], [LONG])
    whole = attend(asked, case.batch, case.q, case.kv, selection_of(prefill_row, asked))
    for at in EDGES:
        batch = part_of(case.batch, 1, at + 1)
        q = case.q[at : at + 1]
        alone = attend(decode, batch, q, case.kv, selection_of(decode_row, decode))

        assert torch.equal(alone, whole[at : at + 1]), at


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("combination", named(COMBINATIONS))
def test_many_decodes_in_one_step_have_the_bits_of_the_whole_prompt(pair, combination):
    asked = invariant_problem(Phase.PREFILL, combination)
    decode = dataclasses.replace(asked, phase=Phase.DECODE)
    prefill_row, decode_row = pair
    case = make(asked, [LONG], [LONG])
    whole = attend(asked, case.batch, case.q, case.kv, selection_of(prefill_row, asked))
    chosen = torch.tensor(
        [*EDGES, *random.Random(5).sample(range(LONG), 200)], device=case.q.device
    )
    batch = dataclasses.replace(
        case.batch,
        cu_seqlens_q=torch.arange(len(chosen) + 1, dtype=torch.int32, device=case.q.device),
        seq_lens=(chosen + 1).int(),
        block_table=case.batch.block_table.expand(len(chosen), -1).contiguous(),
        num_tokens=len(chosen),
        max_seqlen_q=1,
    )
    together = attend(decode, batch, case.q[chosen], case.kv, selection_of(decode_row, decode))

    assert torch.equal(together, whole[chosen])


@pytest.mark.parametrize("row", PREFILL)
@pytest.mark.parametrize("combination", named(COMBINATIONS))
def test_random_chunks_have_the_bits_of_the_whole_prompt(row, combination):
    problem = invariant_problem(Phase.PREFILL, combination)
    selection = selection_of(row, problem)
    case = make(problem, [LONG], [LONG])
    whole = attend(problem, case.batch, case.q, case.kv, selection)
    rng, start = random.Random(11), 0
    while start < LONG:
        stop = min(LONG, start + rng.choice((1, 2, 7, 33, 64, 65, 130, 500, 1024, 1500)))
        batch = part_of(case.batch, stop - start, stop)
        chunk = attend(problem, batch, case.q[start:stop], case.kv, selection)

        assert torch.equal(chunk, whole[start:stop]), f"tokens {start} to {stop}"
        start = stop


@BOTH
@pytest.mark.parametrize("most", [0, 64, 1000])
@pytest.mark.parametrize("combination", named(COMBINATIONS))
def test_the_parts_that_are_computed_side_by_side_change_no_bit(
    row, combination, most, monkeypatch
):
    problem = invariant_problem(row.phase, combination)
    queries = [1] * 6 if row.phase is Phase.DECODE else [3, 8, 1, 5, 200, 2]
    case = make(problem, queries, [LONG, 2047, 1025, 3000, 1500, 9000])
    selection = selection_of(row, problem)
    with_all = attend(problem, case.batch, case.q, case.kv, selection)
    monkeypatch.setattr("kernels.attention.portable.part_list.MOST_PART_ROWS", most)

    assert torch.equal(attend(problem, case.batch, case.q, case.kv, selection), with_all)


@BOTH
def test_a_plan_gives_the_same_bits_for_each_layer_that_it_runs(row):
    problem = invariant_problem(row.phase, COMBINATIONS[0])
    queries = [1] * 40 if row.phase is Phase.DECODE else [300, 1, 40, 7] * 10
    case = make(problem, queries, [LONG, 700, 2049, 1024] * 10)
    plan = kernels.plan_attention(problem, case.batch, selection=selection_of(row, problem))
    call = kernels.decode_attention if row.phase is Phase.DECODE else kernels.prefill_attention
    outputs = [torch.full_like(case.q, float("nan")) for _ in range(20)]
    for out in outputs:
        call(case.q, case.kv, plan, out)

    assert all(torch.equal(out, outputs[0]) for out in outputs)


@BOTH
@pytest.mark.parametrize("combination", named(COMBINATIONS))
def test_the_results_agree_with_the_reference(row, combination):
    problem = invariant_problem(row.phase, combination)
    queries = [1] * 4 if row.phase is Phase.DECODE else [300, 1, 700, 20]
    case = make(problem, queries, [LONG, 600, 1000, 20])

    case.check(attend(problem, case.batch, case.q, case.kv, selection_of(row, problem)))
