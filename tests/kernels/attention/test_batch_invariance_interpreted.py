"""Batch-invariant results have the same bits in every batch; in Triton's interpreter, on small shapes."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from kernels.attention.problem import Phase
from kernels.testing.problems import Layout, make_case
from tests.gpu.attention_cases import attend, one_sequence
from tests.kernels import triton_interpreter
from tests.kernels.attention.test_portable_interpreted import PHASES, problem, select

pytestmark = triton_interpreter.interpreted

NEIGHBOURS = [2, 17, 256]
KEPT = 150
"""Tokens of the sequence whose bits are compared: more than two splits."""


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    from kernels.attention.gpu import split_list

    monkeypatch.setattr(split_list, "BATCH_INVARIANT_SPLIT_TOKENS", 64)
    with triton_interpreter.poisoned_memory():
        yield


def among(asked, kept, count, seed):
    """Return a sequence's output in a batch with `count - 1` random sequences, and alone over the same cache."""
    rng = random.Random(seed)
    longest = 200 if count < 100 else 20
    most = asked.max_query_tokens if asked.phase is Phase.DECODE else 12
    queries = [rng.randint(1, most) for _ in range(count - 1)]
    lengths = [rng.randint(least, longest) for least in queries]
    index = rng.randrange(count)
    queries.insert(index, kept)
    lengths.insert(index, KEPT)
    case = make_case(asked, queries, lengths, layout=Layout.FRAGMENTED, seed=seed)
    selection = select(asked.phase)
    together = attend(asked, case.batch, case.q, case.kv, selection)
    batch, q = one_sequence(case, index)
    first = sum(queries[:index])
    case.check(together)
    return together[first : first + kept], attend(asked, batch, q, case.kv, selection)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("count", NEIGHBOURS)
def test_a_sequence_has_the_same_bits_alone_and_in_a_random_batch(phase, count):
    asked = problem(phase, "bfloat16", 2, 1, 32, batch_invariant=True)

    together, alone = among(asked, 1 if phase is Phase.DECODE else 40, count, seed=count)

    assert torch.equal(together, alone)


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_several_queries_of_a_decode_have_the_same_bits_alone_and_in_a_random_batch(kept):
    asked = problem(Phase.DECODE, "bfloat16", 6, 2, 32, batch_invariant=True, max_query_tokens=5)

    together, alone = among(asked, kept, 17, seed=kept)

    assert torch.equal(together, alone)


@pytest.mark.parametrize("chunk", [32, 50])
def test_a_chunked_prompt_has_the_same_bits_alone_and_in_a_random_batch(chunk):
    asked = problem(Phase.PREFILL, "bfloat16", 6, 2, 32, batch_invariant=True)
    lengths = [KEPT, 70, 33]
    case = make_case(asked, [KEPT, 20, 33], lengths)
    selection = select(Phase.PREFILL)
    for start in range(0, KEPT, chunk):
        stop = min(start + chunk, KEPT)
        outs = []
        for others in ([], [1, 2]):
            queries = [stop - start, *(case.query_lens[other] for other in others)]
            offsets = [sum(queries[:index]) for index in range(len(queries) + 1)]
            batch = dataclasses.replace(
                case.batch,
                cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32),
                seq_lens=torch.tensor([stop, *(lengths[it] for it in others)], dtype=torch.int32),
                block_table=case.batch.block_table[[0, *others]],
                num_tokens=sum(queries),
                max_seqlen_q=max(queries),
            )
            q = torch.cat((case.q[start:stop], case.q[KEPT:] if others else case.q[:0]))
            outs.append(attend(asked, batch, q, case.kv, selection)[: stop - start])

        assert torch.equal(*outs)
