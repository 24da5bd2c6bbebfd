"""Matrices that are stored as the rows of one."""

import pytest
import torch

from kernels.stacked import ROW_MULTIPLE, can_be_stacked, empty_stacked, stacked
from kernels.weight_format import FP8_ROWS, INT4_GROUPS, INT8_GROUPS, WeightFormat, unquantized
from kernels.weights import Weight, quantize

BLOCKS = WeightFormat("fp8-blocks", 8, 32, "block")
FORMATS = [unquantized("bfloat16"), FP8_ROWS, INT8_GROUPS, INT4_GROUPS, BLOCKS]
INPUTS = 64


def values(rows):
    return torch.randn((rows, INPUTS), generator=torch.Generator().manual_seed(rows))


def written(form, rows, device="cpu"):
    parts = empty_stacked(form, rows, INPUTS, torch.device(device))
    for part, count in zip(parts, rows, strict=True):
        source = Weight.full(values(count))
        part.copy_(quantize(source.numbers, form) if form.is_quantized else source)
    return parts


@pytest.mark.parametrize("form", FORMATS, ids=lambda it: it.name)
def test_the_matrix_of_both_has_their_rows_and_zeros(form):
    rows = (96, 64)
    first, second = written(form, rows)

    whole = stacked(first, second)

    assert whole.shape == (2 * ROW_MULTIPLE, INPUTS)
    assert whole.format == form
    found = whole.dequantize().split([*rows, 96])
    assert torch.equal(found[0], first.dequantize())
    assert torch.equal(found[1], second.dequantize())
    assert not found[2].any()


def test_changes_of_a_part_are_changes_of_the_whole():
    first, second = written(FP8_ROWS, (100, 4))
    whole = stacked(first, second)

    second.copy_(quantize(torch.ones(4, INPUTS), FP8_ROWS))

    assert torch.equal(whole.dequantize()[100:104], torch.ones(4, INPUTS))


def test_without_memory_the_matrix_of_both_has_its_shape_alone():
    first, second = empty_stacked(FP8_ROWS, (100, 4), INPUTS, torch.device("meta"))

    assert stacked(first, second).shape == (ROW_MULTIPLE, INPUTS)
    assert stacked(first, Weight.empty(FP8_ROWS, (4, INPUTS), "meta")) is None


def test_matrices_that_are_stored_apart_have_no_matrix_of_both():
    full = unquantized("bfloat16")
    first, second = written(full, (100, 4))

    assert stacked(second, first) is None
    assert stacked(first, Weight.full(second.numbers.clone())) is None
    assert stacked(first, Weight.full(second.numbers.float())) is None
    assert stacked(first.rows(0, 50), second) is None


def test_matrices_beside_others_in_one_memory_have_no_matrix_of_both():
    flat = torch.zeros(4 * ROW_MULTIPLE * INPUTS, dtype=torch.bfloat16)
    parts = [Weight.full(it.view(-1, INPUTS)) for it in flat.split(ROW_MULTIPLE * INPUTS)]

    assert stacked(parts[0], parts[1]) is None
    assert stacked(parts[1], parts[2]) is None


def test_scales_of_blocks_and_an_order_of_the_inputs_are_not_shared():
    assert can_be_stacked(BLOCKS, (96, 64))
    assert not can_be_stacked(BLOCKS, (96, 16))
    assert not can_be_stacked(BLOCKS, (80, 16))
    assert can_be_stacked(INT4_GROUPS, (80, 16))
    ordered = WeightFormat("int4", 4, 32, "group", float=False, ordered=True)
    assert not can_be_stacked(ordered, (96, 64))
