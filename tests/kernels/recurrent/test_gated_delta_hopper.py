"""The gated delta rule with Hopper's kernel for states, on a CPU, against its formula."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.recurrent.gpu import gated_delta
from tests.kernels import triton_interpreter
from tests.kernels.recurrent.carry_on_cpu import CarryOnCPU
from tests.kernels.recurrent.cases import (
    NEW,
    RAGGED,
    ROWS,
    Sequence,
    Step,
    check_divided,
    check_kept_blocks,
    check_mean_error,
    check_nothing_written,
    delta_shape,
)
from tests.kernels.references.gated_delta import gated_delta_blocks

pytestmark = triton_interpreter.interpreted


@pytest.fixture(autouse=True)
def launches():
    torch.manual_seed(0)
    carry = CarryOnCPU()
    with (
        mock.patch.object(gated_delta, "detect", return_value=CATALOGUE["h100"]),
        mock.patch.object(gated_delta, "carry_in_flight", carry),
        triton_interpreter.poisoned_memory(),
    ):
        yield
    assert carry.launches


@pytest.mark.parametrize("length", [1, 3, 64, 65, 140, 300])
def test_a_prompt_agrees_with_the_formula(length):
    step = Step(
        delta_shape(2, 2, 16, 64), prompts=[Sequence(length, 0, NEW, 2)], dtype=torch.float16
    )

    step.check(gated_delta.GatedDelta, plain=torch.float16)


def test_sequences_of_a_step_are_independent():
    step = Step(delta_shape(4, 2, 24, 40), ROWS, RAGGED, torch.float16)

    step.check(gated_delta.GatedDelta, plain=torch.float16)


@pytest.mark.parametrize("sizes", [(2, 1, 128, 128), (1, 1, 96, 192)], ids=str)
def test_sizes(sizes):
    prompts = [Sequence(66, 3, 4, 4), Sequence(1, 0, NEW, 5)]
    step = Step(delta_shape(*sizes), prompts=prompts, dtype=torch.float16)

    step.check(gated_delta.GatedDelta, plain=torch.float16)


@pytest.mark.parametrize("decay", [-6.0, 0.0])
def test_half_precision_is_as_exact_as_that_of_the_field(decay):
    prompts = [Sequence(200, 0, NEW, 0)]
    step = Step(delta_shape(1, 1, 128, 64), prompts=prompts, dtype=torch.float16, decay=decay)

    check_mean_error(gated_delta.GatedDelta, step, gated_delta_blocks)


def test_unused_rows_and_steps_of_nothing_write_nothing():
    check_nothing_written(gated_delta.GatedDelta, delta_shape(2, 2, 16, 64))
    Step(delta_shape(1, 1, 16, 64), prompts=[Sequence(1)], dtype=torch.float16).run(
        gated_delta.GatedDelta
    )


@pytest.mark.parametrize("ends", [(64, 128, 150), (128, 150)], ids=str)
def test_the_bits_do_not_depend_on_where_a_prompt_is_divided(ends):
    check_divided(gated_delta.GatedDelta, delta_shape(2, 1, 40, 56), ends, torch.float16)


def test_states_kept_within_a_prompt_have_the_bits_of_those_after_a_prompt():
    check_kept_blocks(gated_delta.GatedDelta, delta_shape(2, 1, 24, 40), 62, 140, torch.float16)
