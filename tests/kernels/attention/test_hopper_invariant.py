"""Hopper's batch-invariant attention without a GPU: its own code on the CPU, whose bits are the same in every step."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.registry import INVARIANT_REGISTRY
from tests.gpu.attention_cases import attend
from tests.kernels import triton_interpreter
from tests.kernels.attention.test_invariant_interpreted import step_beside
from tests.kernels.references.problems import Layout, make_case
from tests.marks import slow_except

pytestmark = triton_interpreter.interpreted

ARCH = dataclasses.replace(CATALOGUE["h100"], num_sms=3)
LENGTH = 230
"""Tokens of the sequence whose bits are compared: four parts, of which the last has a few tiles."""
PART, BLOCK_N = 64, 16
LENGTHS = [LENGTH, 90, 33, 200]
# dtype, query heads, key-value heads, head dim, block size, features.
SHAPES = [
    ("bfloat16", 2, 1, 128, 16, {}),
    ("float16", 3, 1, 64, 16, {}),
    ("bfloat16", 7, 1, 64, 32, {"sliding_window": 70}),
    ("bfloat16", 4, 1, 256, 16, {}),
    ("bfloat16", 6, 3, 80, 16, {"softcap": 15.0}),
    ("bfloat16", 16, 1, 64, 16, {"sliding_window": 1}),
    ("bfloat16", 2, 2, 256, 64, {"sliding_window": 130, "softcap": 15.0}),
    ("bfloat16", 64, 1, 64, 16, {}),
]


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Run the kernel on the CPU, with short parts."""
    from kernels.attention.hopper import invariant
    from tests.kernels.attention.hopper_roles_on_cpu import KernelOnCPU

    monkeypatch.setattr(invariant, "PART_TOKENS", PART)
    monkeypatch.setattr(invariant, "invariant", KernelOnCPU(invariant.invariant))
    with triton_interpreter.poisoned_memory():
        yield invariant.invariant


def problem_of(phase, shape):
    dtype, heads, kv_heads, head_dim, block_size, features = shape
    return AttentionProblem(
        phase, dtype, heads, kv_heads, head_dim, block_size, head_dim**-0.5, **features, batch_invariant=True,
    )  # fmt: skip


def selection(asked):
    rows = [row for row in INVARIANT_REGISTRY if row.name.startswith("hopper")]
    found = kernels.select(asked, ARCH, registry=rows)
    launch = dataclasses.replace(found.launches[-1].launch, block_n=BLOCK_N)
    return dataclasses.replace(
        found, launches=(dataclasses.replace(found.launches[-1], launch=launch),)
    )


def step(case, asked, start, stop, others, rng):
    """Return the outputs of tokens start to stop of the first sequence, computed beside other sequences."""
    return step_beside(case, asked, selection(asked), start, stop, others, rng)


def whole(shape):
    """Return the problem of a prompt, its case, and the outputs of all tokens of its first sequence."""
    asked = problem_of(Phase.PREFILL, shape)
    case = make_case(asked, LENGTHS, LENGTHS, layout=Layout.FRAGMENTED)
    return asked, case, step(case, asked, 0, LENGTH, [], random.Random(0))


@pytest.mark.parametrize("phase", list(Phase), ids=lambda it: it.value)
@pytest.mark.parametrize("shape", slow_except(SHAPES[:5], SHAPES), ids=str)
def test_the_results_agree_with_the_reference(phase, shape):
    queries = [1, 1, 1, 1, 1] if phase is Phase.DECODE else [20, 90, 1, 33, 100]
    asked = problem_of(phase, shape)
    case = make_case(asked, queries, [LENGTH, 90, 200, 64, 300], layout=Layout.FRAGMENTED)

    case.check(attend(asked, case.batch, case.q, case.kv, selection(asked)))


@pytest.mark.parametrize("shape", slow_except(SHAPES[2:5:2], SHAPES), ids=str)
def test_a_chunk_has_the_bits_of_the_whole_prompt_in_any_batch(shape):
    asked, case, expected = whole(shape)
    rng = random.Random(1)
    for others in ([], [1], [3, 2]):
        start = rng.randrange(LENGTH)
        stop = rng.randint(start + 1, min(LENGTH, start + 60))

        assert torch.equal(step(case, asked, start, stop, others, rng), expected[start:stop])


@pytest.mark.parametrize("shape", slow_except(SHAPES[2:5:2], SHAPES), ids=str)
def test_a_decoded_token_has_the_bits_that_a_prompt_has(shape):
    asked, case, expected = whole(shape)
    decode = dataclasses.replace(asked, phase=Phase.DECODE)
    rng = random.Random(2)
    for at in (0, 15, 63, 64, 127, 128, 150, LENGTH - 1):
        others = rng.sample([1, 2, 3], rng.randint(0, 3))

        assert torch.equal(step(case, decode, at, at + 1, others, rng), expected[at : at + 1]), at


@pytest.mark.parametrize("most", [0, 3, 20])
@pytest.mark.parametrize("shape", SHAPES[2:5], ids=str)
@pytest.mark.parametrize("phase", list(Phase), ids=lambda it: it.value)
def test_the_parts_that_have_items_of_their_own_change_no_bit(phase, shape, most, monkeypatch):
    from kernels.attention.portable import part_list

    asked = problem_of(phase, shape)
    queries = [1] * 4 if phase is Phase.DECODE else [5, 1, 3, 7]
    case = make_case(asked, queries, [LENGTH, 200, 30, 129])
    with_all = attend(asked, case.batch, case.q, case.kv, selection(asked))
    monkeypatch.setattr(part_list, "MOST_PART_ROWS", most * 64)

    assert torch.equal(attend(asked, case.batch, case.q, case.kv, selection(asked)), with_all)


def test_sequences_without_tokens_are_skipped():
    asked = problem_of(Phase.DECODE, SHAPES[0])
    case = make_case(asked, [1] * 3, [LENGTH, 70, 30])
    expected = attend(asked, case.batch, case.q, case.kv, selection(asked))
    lengths = torch.tensor([LENGTH, 0, 30], dtype=torch.int32)
    padded = dataclasses.replace(case.batch, seq_lens=lengths)

    out = attend(asked, padded, case.q, case.kv, selection(asked))

    assert torch.equal(out[[0, 2]], expected[[0, 2]])
    assert not out[1].any()


def test_a_step_of_decodes_has_a_single_consumer(launches):
    asked = problem_of(Phase.DECODE, SHAPES[0])
    case = make_case(asked, [1] * 8, [40] * 8)
    attend(asked, case.batch, case.q, case.kv, selection(asked))

    assert launches.products.keys() == {0}
