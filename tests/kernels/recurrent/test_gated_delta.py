"""The gated delta rule in PyTorch's operations against its formula."""

from __future__ import annotations

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.recurrent.problem import CHUNK, RecurrentProblem
from kernels.recurrent.pytorch.gated_delta import GatedDelta
from kernels.recurrent.registry import select
from tests.kernels.recurrent.cases import (
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
    delta_shape,
)

LENGTHS = (1, 2, 3, 63, 64, 65, 127, 128, 200)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_agrees_with_the_formula(length, dtype):
    Step(delta_shape(), prompts=[Sequence(length, 0, NEW, 2)], dtype=dtype).check(GatedDelta)


@pytest.mark.parametrize("start", [1, 37, 63, 64, 65, 1000])
def test_a_part_of_a_prompt_continues_from_its_state(start):
    for length in (1, 27, 64, 130):
        Step(delta_shape(), prompts=[Sequence(length, start, 5, 5)]).check(GatedDelta)


def test_sequences_of_a_step_are_independent():
    Step(delta_shape(), ROWS, RAGGED).check(GatedDelta)


def test_unused_rows_and_steps_of_nothing_write_nothing():
    check_nothing_written(GatedDelta, delta_shape())


@pytest.mark.parametrize("spread", [0.1, 30.0])
@pytest.mark.parametrize("decay", [-12.0, 0.0, 3.0, 100.0])
def test_weak_and_strong_decays_beside_each_other_are_exact(decay, spread):
    check_decays(GatedDelta, delta_shape(), decay, gate_spread=spread)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 64, 64),
        (2, 2, 128, 128),
        (4, 1, 32, 48),
        (2, 1, 96, 256),
        (6, 3, 256, 64),
        (3, 3, 24, 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [2, 4])
def test_sizes(sizes, width):
    shape = delta_shape(*sizes, width=width)

    Step(shape, [(0, 1), (2, 2)], [Sequence(66, 3, 4, 4), Sequence(1, 0, NEW, 5)]).check(GatedDelta)


@pytest.mark.parametrize(
    "ends", [(64, 128, 192, 250), (128, 250), (192, 250), (64, 192, 250)], ids=str
)
def test_the_bits_do_not_depend_on_where_a_prompt_is_divided(ends):
    check_divided(GatedDelta, delta_shape(3, 3, 40, 56), ends)


@pytest.mark.parametrize(("start", "length"), [(0, 140), (62, 70), (63, 66)])
def test_states_kept_within_a_prompt_have_the_bits_of_those_after_a_prompt(start, length):
    check_kept_blocks(GatedDelta, delta_shape(2, 1, 24, 40), start, length)


@pytest.mark.parametrize("sizes", [(4, 2, 16, 16), (3, 1, 24, 40), (1, 1, 7, 5)], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_the_others(sizes):
    check_alone(GatedDelta, delta_shape(*sizes), 7)


def test_whole_sequences_agree_with_the_formula_and_can_be_trained():
    check_trained(GatedDelta, delta_shape(), CHUNK + 6)


@pytest.mark.parametrize(
    ("arch", "dtype", "size", "trainable", "name"),
    [
        ("h100", "bfloat16", 256, False, "triton_gated_delta"),
        ("a100", "float32", 128, False, "triton_gated_delta"),
        ("h100", "float32", 256, False, "torch_recurrent"),
        ("h100", "bfloat16", 320, False, "torch_recurrent"),
        ("h100", "bfloat16", 128, True, "torch_recurrent"),
        ("t4", "float16", 128, False, "torch_recurrent"),
        ("cpu", "bfloat16", 128, True, "torch_recurrent"),
    ],
)
def test_kernels_by_processor_dtype_and_size_of_heads(arch, dtype, size, trainable, name):
    problem = RecurrentProblem(delta_shape(16, 16, 128, size), dtype, trainable)

    assert select(problem, CATALOGUE[arch]).spec.name == name
