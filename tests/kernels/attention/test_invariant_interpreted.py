"""Batch-invariant attention in Triton's interpreter: a query's bits are the same in every step that computes it."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.attention.problem import Phase
from kernels.attention.select import select
from tests.gpu.attention_cases import attend
from tests.kernels import triton_interpreter
from tests.kernels.attention.test_portable_interpreted import problem
from tests.kernels.references.problems import Layout, make_case

pytestmark = triton_interpreter.interpreted

LENGTH = 150
"""Tokens of the sequence whose bits are compared: more than two parts."""
SHAPES = [
    {"heads": 2, "kv_heads": 1, "head_dim": 32},
    {"heads": 6, "kv_heads": 2, "head_dim": 80},
    {"heads": 2, "kv_heads": 2, "head_dim": 32, "sliding_window": 70},
    {"heads": 4, "kv_heads": 1, "head_dim": 32, "softcap": 15.0, "block_size": 48},
]


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch):
    from kernels.attention.portable import launch

    monkeypatch.setattr(launch, "PART_TOKENS", 64)
    with triton_interpreter.poisoned_memory():
        yield


def selection(asked):
    return select(asked, CATALOGUE["a100"])


def batch_of(case, queries, lengths, members, loose=1):
    """Return the batch in which `members` of a case's sequences have these lengths, and end with these queries."""
    offsets = [sum(queries[:i]) for i in range(len(queries) + 1)]
    return dataclasses.replace(
        case.batch,
        cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=case.batch.block_table[members],
        num_tokens=sum(queries),
        max_seqlen_q=max(queries),
        max_seqlen_k=max(lengths) * loose,
    )


def step_beside(case, asked, selected, start, stop, others, rng, most_queries=10**6):
    """Return the outputs of tokens start to stop of the first sequence, computed beside random parts of `others`.

    Each of these has at most `most_queries` query tokens.
    """
    members, queries, lengths = [0], [stop - start], [stop]
    for other in others:
        length = rng.randint(1, case.seq_lens[other])
        members.append(other)
        most = 1 if asked.phase is Phase.DECODE else min(length, most_queries)
        queries.append(rng.randint(1, most))
        lengths.append(length)
    order = rng.sample(range(len(members)), len(members))
    members, queries, lengths = ([them[i] for i in order] for them in (members, queries, lengths))
    starts = [0, *(sum(case.query_lens[: other + 1]) for other in range(4))]
    rows = [
        case.q[starts[m] + n - count : starts[m] + n]
        for m, count, n in zip(members, queries, lengths, strict=True)
    ]
    batch = batch_of(case, queries, lengths, members, rng.choice((1, 3)))
    out = attend(asked, batch, torch.cat(rows), case.kv, selected)
    first = sum(queries[: order.index(0)])
    return out[first : first + stop - start]


def random_step(case, asked, start, stop, rng):
    """Like `step_beside`, beside any of the other sequences."""
    others = rng.sample([1, 2, 3], rng.randint(0, 3))
    return step_beside(case, asked, selection(asked), start, stop, others, rng, most_queries=20)


def whole_case(asked, seed=0):
    lengths = [LENGTH, 90, 33, 200]
    return make_case(asked, lengths, lengths, layout=Layout.FRAGMENTED, seed=seed)


@pytest.mark.parametrize("phase", list(Phase), ids=lambda it: it.value)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_results_agree_with_the_reference(phase, shape):
    queries = [1, 1, 1, 1] if phase is Phase.DECODE else [20, 90, 1, 33]
    asked = problem(phase, "bfloat16", **shape, batch_invariant=True)
    case = make_case(asked, queries, [LENGTH, 90, 200, 64], layout=Layout.FRAGMENTED)

    case.check(attend(asked, case.batch, case.q, case.kv, selection(asked)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_chunk_has_the_bits_of_the_whole_prompt_in_any_batch(shape):
    asked = problem(Phase.PREFILL, "bfloat16", **shape, batch_invariant=True)
    case, rng = whole_case(asked), random.Random(0)
    whole = random_step(case, asked, 0, LENGTH, rng)
    for _ in range(6):
        start = rng.randrange(LENGTH)
        stop = rng.randint(start + 1, LENGTH)

        assert torch.equal(random_step(case, asked, start, stop, rng), whole[start:stop])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_decoded_token_has_the_bits_that_a_prompt_has(shape):
    asked = problem(Phase.PREFILL, "bfloat16", **shape, batch_invariant=True)
    decode = dataclasses.replace(asked, phase=Phase.DECODE)
    case, rng = whole_case(asked), random.Random(1)
    whole = random_step(case, asked, 0, LENGTH, rng)
    for at in (0, 1, 62, 63, 64, 65, 127, 128, LENGTH - 1):
        assert torch.equal(random_step(case, decode, at, at + 1, rng), whole[at : at + 1])


@pytest.mark.parametrize("most", [0, 6, 12])
def test_the_parts_that_have_programs_of_their_own_change_no_bit(most, monkeypatch):
    from kernels.attention.portable import part_list

    asked = problem(Phase.DECODE, "bfloat16", 2, 1, 32, batch_invariant=True)
    case = make_case(asked, [1] * 4, [LENGTH, 200, 30, 129])
    with_all = attend(asked, case.batch, case.q, case.kv, selection(asked))
    monkeypatch.setattr(part_list, "MOST_PART_ROWS", most)

    assert torch.equal(attend(asked, case.batch, case.q, case.kv, selection(asked)), with_all)


def test_sequences_without_tokens_are_skipped():
    asked = problem(Phase.DECODE, "bfloat16", 2, 1, 32, batch_invariant=True)
    case = make_case(asked, [1] * 3, [LENGTH, 70, 30])
    expected = attend(asked, case.batch, case.q, case.kv, selection(asked))
    lengths = torch.tensor([LENGTH, 0, 30], dtype=torch.int32)
    padded = dataclasses.replace(case.batch, seq_lens=lengths)

    out = attend(asked, padded, case.q, case.kv, selection(asked))

    assert torch.equal(out[[0, 2]], expected[[0, 2]])
