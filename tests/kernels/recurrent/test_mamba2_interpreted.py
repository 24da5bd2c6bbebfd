"""Short convolution and Mamba-2 in Triton's interpreter against their formulas.

The interpreter rounds products of bfloat16 wrongly, so 16-bit numbers are float16.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.recurrent.gpu import mamba2_prompt, mamba2_step
from kernels.recurrent.gpu.mamba2 import Mamba2
from kernels.recurrent.gpu.short_conv import ShortConv
from kernels.recurrent.problem import Mamba2Shape, ShortConvShape
from kernels.recurrent.pytorch import mamba2 as pytorch
from tests.kernels import triton_interpreter
from tests.kernels.recurrent.cases import (
    MAMBA2,
    NEW,
    RAGGED,
    ROWS,
    SHORT_CONV,
    Sequence,
    Step,
    check_alone,
    check_decays,
    check_divided,
    check_drafts,
    check_kept_blocks,
    check_nothing_written,
    in_slots,
    variants,
)
from tests.kernels.references.mamba2 import mamba2_blocks

pytestmark = triton_interpreter.interpreted

DTYPES = [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def _poison():
    torch.manual_seed(0)
    with triton_interpreter.poisoned_memory():
        yield


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [SHORT_CONV, ShortConvShape(20, 4, bias=True), ShortConvShape(300, 2)], ids=str
)
def test_the_sequences_of_a_short_convolution_agree_with_the_formula(shape, dtype):
    Step(shape, ROWS, RAGGED, dtype).check(ShortConv)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 15, 16, 17])
def test_a_prompt_may_be_shorter_than_the_convolution(length):
    shape = ShortConvShape(16, 6)
    Step(shape, prompts=[Sequence(length, 0, NEW, 2), Sequence(length, 9, 3, 3)]).check(ShortConv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sequences_of_a_step_agree_with_the_formula(dtype):
    Step(MAMBA2, ROWS, RAGGED, dtype).check(Mamba2, rounded=mamba2_blocks)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129])
def test_a_prompt_agrees_with_the_formula(length):
    prompts = [Sequence(length, 0, NEW, 2), Sequence(length, 63, 3, 3)]
    Step(MAMBA2, prompts=prompts).check(Mamba2)


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_a_prompt_in_16_bits_is_as_exact_as_products_of_rounded_factors(norm_before_gate):
    shape = dataclasses.replace(MAMBA2, norm_before_gate=norm_before_gate, state_dim=64)
    prompts = [Sequence(200, 0, NEW, 2), Sequence(70, 0, 3, 3)]

    Step(shape, prompts=prompts, dtype=torch.float16).check(Mamba2, rounded=mamba2_blocks)


@pytest.mark.parametrize("shape", variants().values(), ids=variants())
def test_variants(shape):
    Step(shape, [(0, 1), (2, 2)], [Sequence(66, 3, 4, 4), Sequence(1, 0, NEW, 5)]).check(Mamba2)


@pytest.mark.parametrize("spread", [0.1, 10.0])
@pytest.mark.parametrize("decay", [-12.0, 3.0, 80.0])
def test_weak_and_strong_decays_beside_each_other_are_exact(decay, spread):
    check_decays(Mamba2, MAMBA2, decay, spread=spread)


def test_groups_larger_than_a_program_are_normalized(monkeypatch):
    monkeypatch.setattr(mamba2_step, "_NORMALIZED", 16)

    Step(MAMBA2, [(0, 1)], [Sequence(2, 0, NEW, 5)]).check(Mamba2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most", [3, 8])
def test_a_program_of_several_heads_changes_no_bits(most, dtype, monkeypatch):
    shape = dataclasses.replace(MAMBA2, num_heads=8)
    step = Step(shape, prompts=[Sequence(130, 5, 3, 2), Sequence(1, 0, NEW, 5)], dtype=dtype)
    alone, states = step.run(Mamba2)
    monkeypatch.setattr(mamba2_prompt, "_PROGRAMS", 1)
    monkeypatch.setattr(mamba2_prompt, "_MOST_HEADS", most)

    together, after = step.run(Mamba2)

    assert torch.equal(together, alone)
    assert all(
        torch.equal(one[[2, 5]], other[[2, 5]]) for one, other in zip(after, states, strict=True)
    )


@pytest.mark.parametrize("state_dim", [100, 128, 256])
def test_parts_of_large_states_agree_with_the_formula(state_dim):
    shape = Mamba2Shape(2, 64, state_dim, 1, 4, None)
    prompts = [Sequence(130, 62, 3, 2), Sequence(64, 0, NEW, 5)]

    Step(shape, prompts=prompts, dtype=torch.float16).check(Mamba2, rounded=mamba2_blocks)


@pytest.mark.parametrize("kernel", [Mamba2, ShortConv])
def test_unused_rows_and_steps_of_nothing_write_nothing(kernel):
    check_nothing_written(kernel, MAMBA2 if kernel is Mamba2 else SHORT_CONV)


@pytest.mark.parametrize(
    ("ends", "dtype"),
    [((64, 128, 192, 250), torch.float32), ((128, 250), torch.float16)],
    ids=str,
)
def test_the_bits_do_not_depend_on_where_a_prompt_is_divided(ends, dtype):
    check_divided(Mamba2, MAMBA2, ends, dtype)


@pytest.mark.parametrize("ends", [(1, 2, 40), (17, 18, 20, 39, 40)], ids=str)
def test_the_bits_of_a_short_convolution_do_not_depend_on_where_a_prompt_is_divided(ends):
    check_divided(ShortConv, ShortConvShape(40, 4), ends)


@pytest.mark.parametrize(("start", "length"), [(0, 140), (62, 70), (63, 66), (63, 2)])
@pytest.mark.parametrize("kernel", [Mamba2, ShortConv])
def test_states_kept_within_a_prompt_have_the_bits_of_those_after_a_prompt(kernel, start, length):
    check_kept_blocks(kernel, MAMBA2 if kernel is Mamba2 else ShortConvShape(48, 4), start, length)


def test_the_bits_of_a_row_do_not_depend_on_the_others():
    check_alone(Mamba2, MAMBA2, 7)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [SHORT_CONV, ShortConvShape(20, 6, bias=True), ShortConvShape(300, 2)], ids=str
)
def test_rows_with_drafts_have_the_bits_of_single_rows_in_a_short_convolution(shape, dtype):
    check_drafts(ShortConv, shape, dtype)


@pytest.mark.parametrize("shape", variants().values(), ids=variants())
def test_rows_with_drafts_have_the_bits_of_single_rows(shape):
    check_drafts(Mamba2, shape)


def test_more_tokens_than_counters_are_kept_for_have_the_same_bits(monkeypatch):
    monkeypatch.setattr(mamba2_step, "_ROWS", 8)

    check_drafts(Mamba2, MAMBA2, torch.float16)


def test_an_object_computes_step_after_step():
    step = Step(MAMBA2, [(i, i) for i in range(3)])
    kernel, plain = Mamba2(MAMBA2, step.weights), pytorch.Mamba2(MAMBA2, step.weights)
    ours, theirs = (in_slots(step.states) for _ in range(2))

    for _ in range(4):
        projected = torch.randn_like(step.projected)
        found = kernel(projected, None, ours, step.segments)
        torch.testing.assert_close(
            found, plain(projected, None, theirs, step.segments), rtol=1e-4, atol=1e-4
        )
