"""Recurrent mixers on a GPU against their formulas, in the sizes of released models."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.recurrent.gpu.gated_delta import GatedDelta
from kernels.recurrent.gpu.mamba2 import Mamba2
from kernels.recurrent.gpu.short_conv import ShortConv
from kernels.recurrent.problem import (
    GatedDeltaShape,
    Mamba2Shape,
    RecurrentWeights,
    ShortConvShape,
)
from kernels.recurrent.segments import Segments
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
    variants,
)
from tests.kernels.references.gated_delta import gated_delta_blocks
from tests.kernels.references.mamba2 import mamba2_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = "cuda"
KERNELS = {GatedDeltaShape: GatedDelta, Mamba2Shape: Mamba2, ShortConvShape: ShortConv}
BLOCKS = {GatedDeltaShape: gated_delta_blocks, Mamba2Shape: mamba2_blocks}
SHAPES = {
    "qwen3.5-0.8b": delta_shape(16, 16, 128, 128),
    "qwen3.5-4b": delta_shape(32, 16, 128, 128),
    "lfm2-1.2b": ShortConvShape(2048, 3),
    "granite-4.0-h-micro": Mamba2Shape(64, 64, 128, 1, 4, 1e-5),
    "falcon-h1-1.5b": Mamba2Shape(48, 64, 256, 1, 4, None),
    "falcon-h1-0.5b": Mamba2Shape(24, 64, 128, 1, 4, None),
}
SMALL = {
    "gated delta": delta_shape(2, 2, 128, 128),
    "mamba2": Mamba2Shape(4, 64, 128, 1, 4, 1e-5),
    "short conv": ShortConvShape(256, 3),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(4, 1, 32, 48), (2, 2, 96, 192), (6, 3, 24, 8), (3, 1, 7, 5)]


class OnGPU:
    """A kernel's object on a GPU for tensors on a CPU.

    Args:
        shape: of the mixer.
        weights: on a CPU.
    """

    def __init__(self, shape, weights):
        self.shape = shape
        moved = (None if it is None else it.to(DEVICE) for it in weights)
        self.kernel = KERNELS[type(shape)](shape, RecurrentWeights(*moved))

    def __call__(self, projected, gates, states, segments):
        """Compute a step; the states, in the strides of a cache, are written."""
        moved = tuple(_moved(it) for it in states)
        kept = segments.kept_slots
        there = Segments(
            segments.rows,
            segments.cu_seqlens.to(DEVICE),
            segments.positions.to(DEVICE),
            segments.slots.to(DEVICE),
            None if kept is None else kept.to(DEVICE),
            by_token=segments.by_token,
        )
        gates = None if gates is None else gates.to(DEVICE)
        out = self.kernel(projected.to(DEVICE), gates, moved, there).cpu()
        for state, after in zip(states, moved, strict=True):
            state.copy_(after)
        return out


def _moved(state):
    """Return a state on the GPU, with its strides."""
    return torch.empty_strided(state.shape, state.stride(), device=DEVICE).copy_(state)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ragged_steps_agree_with_the_formula(shape, dtype):
    rounded = None if dtype is torch.float32 else BLOCKS.get(type(shape))
    Step(shape, ROWS, RAGGED, dtype).check(OnGPU, plain=dtype, rounded=rounded)


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decode_rows_agree_with_the_formula(shape, rows):
    Step(shape, [(i, i) for i in range(rows)], dtype=torch.bfloat16).check(OnGPU)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("decay", [-6.0, 0.0])
@pytest.mark.parametrize(
    "lengths", [(1, 2, 3), (63, 64, 65), (127, 128, 129, 200), (4097,)], ids=str
)
@pytest.mark.parametrize("shape", [SMALL["gated delta"], SMALL["mamba2"]], ids=["delta", "mamba2"])
def test_half_precision_is_as_exact_as_that_of_the_field(shape, lengths, decay, dtype):
    prompts = [Sequence(length, 0, NEW, i) for i, length in enumerate(lengths)]
    step = Step(shape, prompts=prompts, dtype=dtype, decay=decay)

    check_mean_error(OnGPU, step, BLOCKS[type(shape)], 1.5)


@pytest.mark.parametrize("length", [16_384, 65_536])
@pytest.mark.parametrize("shape", [SMALL["gated delta"], SMALL["mamba2"]], ids=["delta", "mamba2"])
def test_long_prompts_are_as_exact_as_those_of_the_field(shape, length):
    step = Step(shape, prompts=[Sequence(length, 0, NEW, 0)], dtype=torch.bfloat16, decay=-3.0)

    check_mean_error(OnGPU, step, BLOCKS[type(shape)], 1.5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_of_the_gated_delta_rule(sizes):
    prompts = [Sequence(66, 3, 4, 4), Sequence(1, 0, NEW, 5)]

    Step(delta_shape(*sizes), [(0, 1), (2, 2)], prompts).check(OnGPU)


def test_the_largest_heads_of_the_gated_delta_rule():
    prompts = [Sequence(66, 3, 4, 4), Sequence(1, 0, NEW, 5)]
    step = Step(delta_shape(2, 1, 256, 256), [(0, 1), (2, 2)], prompts, torch.bfloat16)

    step.check(OnGPU, plain=torch.bfloat16, rounded=gated_delta_blocks)


@pytest.mark.parametrize("shape", variants().values(), ids=variants())
def test_variants_of_mamba2(shape):
    Step(shape, [(0, 1), (2, 2)], [Sequence(66, 3, 4, 4), Sequence(1, 0, NEW, 5)]).check(OnGPU)


@pytest.mark.parametrize("decay", [-12.0, 0.0, 3.0, 80.0])
@pytest.mark.parametrize("shape", [delta_shape(2, 2), SMALL["mamba2"]], ids=["delta", "mamba2"])
def test_weak_and_strong_decays_beside_each_other_are_exact(shape, decay):
    check_decays(OnGPU, shape, decay)


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_unused_rows_and_steps_of_nothing_write_nothing(shape):
    check_nothing_written(OnGPU, shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_bits_do_not_depend_on_where_a_prompt_is_divided(shape, dtype):
    check_divided(OnGPU, shape, (64, 128, 192, 250), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_states_kept_within_a_prompt_have_the_bits_of_those_after_a_prompt(shape, dtype):
    check_kept_blocks(OnGPU, shape, 63, 200, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_bits_of_a_row_do_not_depend_on_the_others(shape, dtype):
    check_alone(OnGPU, shape, 7, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_with_drafts_have_the_bits_of_single_rows(shape, dtype):
    check_drafts(OnGPU, shape, dtype)


@pytest.mark.parametrize("sizes", [*SIZES, (2, 1, 256, 256), (8, 2, 128, 128)], ids=str)
def test_rows_with_drafts_of_the_gated_delta_rule_have_the_bits_of_single_rows(sizes):
    check_drafts(OnGPU, delta_shape(*sizes), torch.bfloat16)


@pytest.mark.parametrize("shape", variants().values(), ids=variants())
def test_rows_with_drafts_of_mamba2_have_the_bits_of_single_rows(shape):
    check_drafts(OnGPU, shape, torch.bfloat16)


@pytest.mark.parametrize(
    "shape", [ShortConvShape(20, 6, bias=True), ShortConvShape(300, 2)], ids=str
)
def test_rows_with_drafts_of_a_short_convolution_have_the_bits_of_single_rows(shape):
    check_drafts(OnGPU, shape, torch.bfloat16)


def test_a_group_of_several_programs_is_normalized():
    shape = dataclasses.replace(SHAPES["granite-4.0-h-micro"], num_heads=128)

    Step(shape, [(0, 1)], [Sequence(2, 0, NEW, 5)], torch.bfloat16).check(
        OnGPU, rounded=mamba2_blocks
    )
