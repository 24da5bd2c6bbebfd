"""The gated delta rule in Triton's interpreter against its formula.

The interpreter rounds products of bfloat16 wrongly, so 16-bit numbers are float16.
"""

from __future__ import annotations

import pytest
import torch

from kernels.recurrent.gpu.gated_delta import GatedDelta
from kernels.recurrent.pytorch import gated_delta as pytorch
from tests.kernels import triton_interpreter
from tests.kernels.recurrent.cases import (
    NEW,
    RAGGED,
    ROWS,
    Sequence,
    Step,
    check_alone,
    check_decays,
    check_divided,
    check_drafts,
    check_kept_blocks,
    check_mean_error,
    check_nothing_written,
    delta_shape,
    make_weights,
)
from tests.kernels.references.gated_delta import gated_delta_blocks

pytestmark = triton_interpreter.interpreted

DTYPES = [torch.float32, torch.float16]
SIZES = (
    ((1, 1, 64, 64), 4),
    ((2, 1, 128, 128), 4),
    ((4, 1, 32, 48), 2),
    ((2, 2, 96, 192), 3),
    ((6, 3, 24, 8), 4),
    ((3, 1, 7, 5), 2),
)
"""Heads and sizes as of `delta_shape`, and widths of the convolution."""


@pytest.fixture(autouse=True)
def _poison():
    torch.manual_seed(0)
    with triton_interpreter.poisoned_memory():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 128, 140])
def test_a_prompt_agrees_with_the_formula(length, dtype):
    shape = delta_shape(2, 2)

    Step(shape, prompts=[Sequence(length, 0, NEW, 2)], dtype=dtype).check(GatedDelta, plain=dtype)


@pytest.mark.parametrize("start", [1, 37, 62, 63, 64, 65, 1000])
def test_a_part_of_a_prompt_continues_from_its_state(start):
    prompts = [Sequence(length, start, i, i) for i, length in enumerate((1, 2, 27, 70))]

    Step(delta_shape(2, 1), prompts=prompts).check(GatedDelta)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_of_a_step_are_independent(dtype):
    Step(delta_shape(4, 2), ROWS, RAGGED, dtype).check(GatedDelta, plain=dtype)


def test_unused_rows_and_steps_of_nothing_write_nothing():
    check_nothing_written(GatedDelta, delta_shape())


@pytest.mark.parametrize("spread", [0.1, 30.0])
@pytest.mark.parametrize("decay", [-12.0, 0.0, 3.0, 100.0])
def test_weak_and_strong_decays_beside_each_other_are_exact(decay, spread):
    check_decays(GatedDelta, delta_shape(2, 2), decay, gate_spread=spread)


def test_equal_keys_that_replace_each_others_values_are_exact():
    step = Step(delta_shape(1, 1), prompts=[Sequence(70, 0, NEW, 0)], decay=-12.0)
    step.projected[:, : 2 * step.shape.key_dim] = torch.rand(2 * step.shape.key_dim)
    step.gates[:, 0] = 20.0

    step.check(GatedDelta)


@pytest.mark.parametrize(("sizes", "width"), SIZES, ids=str)
def test_sizes(sizes, width):
    shape = delta_shape(*sizes, width=width)

    Step(shape, [(0, 1), (2, 2)], [Sequence(66, 3, 4, 4), Sequence(1, 0, NEW, 5)]).check(GatedDelta)


@pytest.mark.slow
def test_the_largest_heads():
    shape = delta_shape(2, 1, 256, 256)

    Step(shape, [(0, 1), (2, 2)], [Sequence(66, 3, 4, 4)]).check(GatedDelta)


@pytest.mark.parametrize("decay", [-6.0, 0.0])
def test_half_precision_is_as_exact_as_that_of_the_field(decay):
    prompts = [Sequence(200, 0, NEW, 0)]
    step = Step(delta_shape(1, 1, 128, 64), prompts=prompts, dtype=torch.float16, decay=decay)

    check_mean_error(GatedDelta, step, gated_delta_blocks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ends", [(64, 128, 150), (128, 150)], ids=str)
def test_the_bits_do_not_depend_on_where_a_prompt_is_divided(ends, dtype):
    check_divided(GatedDelta, delta_shape(2, 1, 40, 56), ends, dtype)


@pytest.mark.parametrize(("start", "length"), [(0, 140), (62, 70), (63, 66)])
def test_states_kept_within_a_prompt_have_the_bits_of_those_after_a_prompt(start, length):
    check_kept_blocks(GatedDelta, delta_shape(2, 1, 24, 40), start, length)


@pytest.mark.parametrize("sizes", [(4, 2, 16, 16), (3, 1, 24, 40), (1, 1, 7, 5)], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_the_others(sizes):
    check_alone(GatedDelta, delta_shape(*sizes), 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "width"), SIZES, ids=str)
def test_rows_with_drafts_have_the_bits_of_single_rows(sizes, width, dtype):
    check_drafts(GatedDelta, delta_shape(*sizes, width=width), dtype)


def test_arrivals_are_counted_anew_in_each_launch():
    step = Step(delta_shape(4, 1), [(0, 0), (1, 1)])
    kernel = GatedDelta(step.shape, step.weights)
    for _ in range(2):
        kernel(step.projected, step.gates, step.states, step.segments)

        assert not kernel._arrivals.any()


def test_whole_sequences_are_computed_as_in_training():
    shape = delta_shape(2, 1)
    weights = make_weights(shape)
    inputs = torch.randn(2, 70, shape.channels + shape.inner), torch.randn(2, 70, 4)

    out = GatedDelta(shape, weights).dense(*inputs)

    assert torch.equal(out, pytorch.GatedDelta(shape, weights).dense(*inputs))
