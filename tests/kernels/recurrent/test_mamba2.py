"""Mamba-2 in PyTorch's operations against its formula."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrent.problem import CHUNK
from kernels.recurrent.pytorch.mamba2 import Mamba2
from tests.kernels.recurrent.cases import (
    MAMBA2,
    NEW,
    RAGGED,
    ROWS,
    Sequence,
    Step,
    check_alone,
    check_decays,
    check_divided,
    check_kept_blocks,
    check_nothing_written,
    check_trained,
    variants,
)


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


def test_unused_rows_and_steps_of_nothing_write_nothing():
    check_nothing_written(Mamba2, MAMBA2)


@pytest.mark.parametrize("shape", variants().values(), ids=variants())
def test_variants(shape):
    Step(shape, [(0, 1), (2, 2)], [Sequence(66, 3, 4, 4), Sequence(1, 0, NEW, 5)]).check(Mamba2)


@pytest.mark.parametrize("spread", [0.1, 10.0])
@pytest.mark.parametrize("decay", [-12.0, 3.0, 80.0])
def test_weak_and_strong_decays_beside_each_other_are_exact(decay, spread):
    check_decays(Mamba2, MAMBA2, decay, spread=spread)


@pytest.mark.parametrize("ends", [(64, 128, 192, 250), (128, 250), (64, 192, 250)], ids=str)
@pytest.mark.parametrize("name", ["one group", "8 groups", "sizes that are no powers of two"])
def test_the_bits_do_not_depend_on_where_a_prompt_is_divided(name, ends):
    check_divided(Mamba2, variants()[name], ends)


@pytest.mark.parametrize(("start", "length"), [(0, 140), (62, 70), (63, 66), (63, 2)])
def test_states_kept_within_a_prompt_have_the_bits_of_those_after_a_prompt(start, length):
    check_kept_blocks(Mamba2, MAMBA2, start, length)


@pytest.mark.parametrize("name", ["one group", "8 groups", "sizes that are no powers of two"])
def test_the_bits_of_a_row_do_not_depend_on_the_others(name):
    check_alone(Mamba2, variants()[name], 7)


def test_whole_sequences_agree_with_the_formula_and_can_be_trained():
    check_trained(Mamba2, MAMBA2, CHUNK + 6)
