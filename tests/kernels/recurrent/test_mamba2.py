"""Mamba-2 in PyTorch's operations against its formula."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrent.problem import CHUNK
from kernels.recurrent.pytorch.mamba2 import Mamba2
from tests.kernels.recurrent.mamba2_cases import (
    MAMBA2,
    NEW,
    RAGGED,
    ROWS,
    UNUSED,
    Sequence,
    Step,
    check_kept,
    divided,
    in_slots,
    make_weights,
    sizes,
    variants,
)
from tests.kernels.references.mamba2 import mamba2
from tests.kernels.references.problems import assert_no_worse_than


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 127, 128, 129, 300])
def test_a_prompt_agrees_with_the_formula(length, dtype):
    Step(MAMBA2, prompts=[Sequence(length, 0, NEW, 2)], dtype=dtype).check(Mamba2)


@pytest.mark.parametrize("start", [1, 37, 63, 64, 65, 1000])
def test_a_part_of_a_prompt_continues_from_its_state(start):
    for length in (1, 27, 64, 130):
        Step(MAMBA2, prompts=[Sequence(length, start, 5, 5)]).check(Mamba2)


def test_sequences_of_a_step_are_independent():
    Step(MAMBA2, ROWS, RAGGED).check(Mamba2)


def test_a_step_of_nothing_gives_nothing():
    out, _ = Step(MAMBA2).run(Mamba2)

    assert out.shape == (0, MAMBA2.inner)


def test_unused_rows_write_nothing():
    step = Step(MAMBA2, [UNUSED] * 3)
    step.projected[:] = torch.nan
    _, states = step.run(Mamba2)

    assert all(bool(state.isnan().all()) for state in states)


@pytest.mark.parametrize("shape", variants().values(), ids=variants())
def test_variants(shape):
    Step(shape, [(0, 1), (2, 2)], [Sequence(66, 3, 4, 4), Sequence(1, 0, NEW, 5)]).check(Mamba2)


@pytest.mark.parametrize("spread", [0.1, 10.0])
@pytest.mark.parametrize("decay", [-12.0, 3.0, 80.0])
def test_weak_and_strong_decays_beside_each_other_are_exact(decay, spread):
    rows, prompts = [(0, 0), (1, 2)], [Sequence(150, 10, 3, 4)]
    step = Step(MAMBA2, rows, prompts, spread=spread, decay=decay)
    step.weights.a_log[0] = -3.0

    step.check(Mamba2)


@pytest.mark.parametrize("ends", [(64, 128, 192, 250), (128, 250), (64, 192, 250)], ids=str)
@pytest.mark.parametrize("name", ["one group", "8 groups", "sizes that are no powers of two"])
def test_the_bits_do_not_depend_on_where_a_prompt_is_divided(name, ends):
    whole = Step(variants()[name], prompts=[Sequence(250, 0, NEW, 0)])
    out, states = whole.run(Mamba2)

    found, now = divided(whole, Mamba2, ends)

    assert torch.equal(found, out)
    for state, other in zip(now, states, strict=True):
        assert torch.equal(state, other[0])


@pytest.mark.parametrize(("start", "length"), [(0, 140), (62, 70), (63, 66), (63, 2)])
def test_states_kept_within_a_prompt_have_the_bits_of_those_after_a_prompt(start, length):
    check_kept(Mamba2, MAMBA2, start, length)


@pytest.mark.parametrize("name", ["one group", "8 groups", "sizes that are no powers of two"])
def test_the_bits_of_a_row_do_not_depend_on_the_others(name):
    shape = variants()[name]
    many = Step(shape, [(i, i) for i in range(7)], [Sequence(9, 0, NEW, 7)])
    out, states = many.run(Mamba2)
    kernel = Mamba2(shape, many.weights)

    for i in range(7):
        now = in_slots(many.states)
        found = kernel(many.projected[i : i + 1], None, now, Step(shape, [(i, i)]).segments)

        assert torch.equal(found[0], out[i])
        for state, other in zip(now, states, strict=True):
            assert torch.equal(state[i], other[i])


def test_whole_sequences_agree_with_the_formula_and_can_be_trained():
    weights = make_weights(MAMBA2)
    width, states = sizes(MAMBA2)
    projected = torch.randn(2, CHUNK + 6, width)
    target = torch.randn(2, CHUNK + 6, MAMBA2.inner)

    def gradients(dtype, compute):
        used = type(weights)(*(it.to(dtype).requires_grad_() for it in weights))
        inputs = projected.to(dtype).requires_grad_()
        out = compute(used, inputs)
        return out.detach(), torch.autograd.grad((out * target).sum(), [inputs, *used])

    def formula(dtype):
        def compute(used, inputs):
            zeros = tuple(torch.zeros(it) for it in states)
            return torch.stack([mamba2(MAMBA2, used, it, zeros, dtype).out for it in inputs])

        return gradients(dtype, compute)

    out, found = gradients(torch.float32, lambda used, inputs: Mamba2(MAMBA2, used).dense(inputs))
    truth, exact = formula(torch.float64)
    same, rounded = formula(torch.float32)

    assert_no_worse_than(out, truth, same)
    for pair in zip(found, exact, rounded, strict=True):
        assert_no_worse_than(*pair, atol=1e-4)
