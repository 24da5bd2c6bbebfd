"""Quantization of weights, and products with packed matrices of any size."""

import pytest
import torch

from kernels.cpu.decoder import CPUDecoder, DecoderShape
from kernels.cpu.library import load
from kernels.cpu.matrix import PackedMatrix
from kernels.weight_format import (
    FP8_ROWS,
    INT4_GROUPS,
    INT8_GROUPS,
    INT8_ROWS,
    WeightFormat,
    is_read_by_library,
)
from kernels.weights import Weight, quantize
from tests.kernels.cpu.reference import FORMATS, product, rounded_activations, rounded_weights

LIBRARY = load()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))


def random_matrix(rows, columns, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def multiply(x, weight, bits, bias=None, threads=2):
    """Round a matrix to 8 or 4 bits and multiply."""
    return multiply_packed(
        x, PackedMatrix(LIBRARY, Weight.full(weight), FORMATS[bits], bias), threads
    )


def multiply_packed(x, matrix, threads=2):
    """Multiply through a decoder without layers, whose head is the matrix."""
    inputs = matrix.c.inputs
    shape = DecoderShape(inputs, 64, 2, 2, 32, 1e-6, 1.0, ())
    return CPUDecoder(shape, [], torch.ones(inputs), matrix, matrix, threads).project(x)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 97, 200])
def test_a_product_is_exact_up_to_the_rounding_of_float32_for_any_number_of_rows(rows, bits):
    x, weight = random_matrix(rows, 192), random_matrix(80, 192, seed=1)

    found = multiply(x, weight, bits)

    expected = product(x, weight, bits)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 31, 32, 33, 500, 4097])
def test_a_matrix_may_have_any_number_of_outputs(outputs, bits):
    x, weight = random_matrix(3, 64), random_matrix(outputs, 64, seed=1)
    bias = random_matrix(1, outputs, seed=2)[0]

    found = multiply(x, weight, bits, bias)

    expected = product(x, weight, bits, bias)
    assert found.shape == (3, outputs)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("extreme", [-1.0, 1.0])
def test_the_largest_numbers_do_not_overflow_the_sums(extreme, bits):
    x = torch.full((2, 8192), -1.0)
    weight = torch.full((32, 8192), extreme)

    found = multiply(x, weight, bits)

    expected = product(x, weight, bits)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_zeros_and_weights_of_zero_give_zero(bits):
    weight = random_matrix(32, 128)
    weight[3] = 0
    x = random_matrix(2, 128)
    x[1] = 0

    found = multiply(x, weight, bits)

    assert (found[1] == 0).all()
    assert found[0, 3] == 0


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-12, 1e-20, 1e-29, 1e30])
def test_activations_of_any_size_keep_their_precision(size, bits):
    x, weight = random_matrix(3, 192), random_matrix(80, 192, seed=1)
    # Far above 1e-30 in each group, below which a group counts as zero.
    x = torch.where(x.abs() < 0.5, x.sign(), x) * size

    found = multiply(x, weight, bits)

    expected = product(x, weight, bits)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_group_of_small_activations_beside_large_ones_keeps_its_precision(bits):
    """Each output reads one group of 64 inputs, whose sizes are far apart."""
    sizes = [1e6, 1.0, 1e-4, 1e-9, 1e-15, 1e-25, 0.0, 1e3]
    x = random_matrix(2, 64 * len(sizes)) * torch.tensor(sizes).repeat_interleave(64)
    weight = torch.block_diag(*random_matrix(16 * len(sizes), 64, seed=1).split(16))

    found = multiply(x, weight, bits)

    expected = product(x, weight, bits)
    for group, size in enumerate(sizes):
        of_group = slice(16 * group, 16 * group + 16)
        error = (found - expected)[:, of_group].abs().max()
        assert error <= 1e-5 * expected[:, of_group].abs().max()
        assert expected[:, of_group].abs().max() >= size


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-32, 1e-38, 1e-44])
def test_activations_below_the_smallest_scale_give_numbers_next_to_zero(size, bits):
    found = multiply(random_matrix(2, 128) * size, random_matrix(32, 128, seed=1), bits)

    assert found.abs().max() <= 128 * 4 * 4 * size


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_makes_its_row_nan_and_no_other(value):
    x, weight = random_matrix(7, 128), random_matrix(64, 128)
    sound = multiply(x, weight, 8)
    x[4, 77] = value

    found = multiply(x, weight, 8)

    assert found[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6]
    assert torch.equal(found[others], sound[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_every_dtype_are_quantized_as_their_float32_values(dtype):
    weight = random_matrix(40, 64, dtype=dtype)
    x = random_matrix(2, 64, seed=1)

    assert torch.equal(multiply(x, weight, 8), multiply(x, weight.float(), 8))


@pytest.mark.parametrize("form", [INT8_ROWS, INT8_GROUPS], ids=lambda it: it.scales)
def test_int8_weights_have_at_most_half_a_step_of_error(form):
    weight = random_matrix(50, 256)

    rounded = quantize(weight, form)

    assert rounded.numbers.dtype is torch.uint8
    assert rounded.numbers.min() >= 1
    error = (rounded.dequantize() - weight).abs().view(*rounded.scale.shape, -1)
    assert (error <= 0.5001 * rounded.scale[..., None]).all()
    assert (rounded.scale <= weight.abs().amax() / 127 * 1.001).all()
    assert torch.equal(rounded.scale.half().float(), rounded.scale)


def test_int4_scales_have_no_larger_error_than_those_of_the_extreme_number():
    weight = random_matrix(50, 256)
    groups = weight.view(50, -1, 32)
    plain_scale = (groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8).half().float()
    plain = torch.round(groups / plain_scale).clamp(-8, 7) * plain_scale

    numbers = quantize(weight, INT4_GROUPS).unpacked()

    assert numbers.max() <= 15
    error = (weight.abs() * (rounded_weights(weight, 4) - weight).square()).view(50, -1, 32).sum(-1)
    plain_error = (groups.abs() * (plain - groups).square()).sum(-1)
    assert (error <= plain_error * 1.0001).all()
    assert error.sum() < 0.95 * plain_error.sum()


def test_activations_lose_at_most_half_a_step_of_their_group():
    x = random_matrix(4, 256) * torch.logspace(-3, 3, 256)

    error = (rounded_activations(x) - x).abs().view(4, -1, 32)

    assert (error <= x.view(4, -1, 32).abs().amax(-1, keepdim=True) / 127 * 0.5001).all()


@pytest.mark.parametrize(("bits", "form"), FORMATS.items())
def test_a_rounded_matrix_has_half_a_bit_of_scales_for_each_weight(bits, form):
    found = PackedMatrix(LIBRARY, Weight.full(random_matrix(64, 128)), form).num_bytes

    assert found == 64 * 128 * bits // 8 + 64 * 128 // 32 * 2 + 64 * 4


def stored(form, outputs, inputs, seed=0):
    """Return a matrix with random numbers, scales and shifts."""
    generator = torch.Generator().manual_seed(seed)
    weight = Weight.empty(form, (outputs, inputs), "cpu")
    low, high = (-128, 128) if form.dtype == "int8" else (0, 256)
    weight.numbers.copy_(torch.randint(low, high, weight.numbers.shape, generator=generator))
    for scale in weight.scales.values():
        scale.copy_(torch.randn(scale.shape, generator=generator) * 0.01)
    return weight


def group_format(bits, group=32, *, shifts=False, offset=0, scale_dtype="float16", scales="group"):
    return WeightFormat(
        "stored", bits, group, scales, shifts, float=False, offset=offset, scale_dtype=scale_dtype
    )


STORED = {
    "Q4_0": group_format(4, offset=8),
    "Q4_1": group_format(4, shifts=True),
    "Q8_0": group_format(8),
    "Q2_K": group_format(4, 16, shifts=True, scale_dtype="float32"),
    "Q3_K": group_format(4, 16, offset=4, scale_dtype="float32"),
    "Q4_K": group_format(4, shifts=True, scale_dtype="float32"),
    "Q5_K": group_format(8, shifts=True, scale_dtype="float32"),
    "Q6_K": group_format(8, 16, scale_dtype="float32"),
    "AWQ": group_format(4, 128, shifts=True, offset=8),
    "GPTQ": group_format(4, 64, offset=8),
    "8 bits, groups of 128, zeros": group_format(8, 128, shifts=True, offset=128),
    "groups of 96": group_format(4, 96, shifts=True),
    "groups of 48": group_format(8, 48, shifts=True),
    "4 bits by row": group_format(4, 0, scales="row", scale_dtype="float32"),
    "4 bits by row, zeros": group_format(4, 0, scales="row", shifts=True, scale_dtype="float32"),
    "8 bits by row, signed": group_format(8, 0, scales="row", scale_dtype="float32"),
    "8 bits by row, zeros": group_format(8, 0, scales="row", shifts=True, scale_dtype="float32"),
    "8 bits by row, wide": group_format(8, 0, offset=128, scales="row", scale_dtype="float32"),
    "blocks": group_format(8, 32, scales="block", scale_dtype="float32"),
    "bfloat16 scales": group_format(8, 64, scale_dtype="bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("form", STORED.values(), ids=STORED)
@pytest.mark.parametrize("rows", [1, 3, 8, 40])
def test_the_numbers_of_a_checkpoint_are_multiplied_as_they_are(form, rows):
    assert is_read_by_library(form)
    inputs = 256 if form == STORED["8 bits by row, wide"] else 224
    weight, x = stored(form, 80, inputs), random_matrix(rows, inputs, seed=1)

    matrix = PackedMatrix(LIBRARY, weight, INT8_GROUPS, random_matrix(1, 80, seed=2)[0])
    found = multiply_packed(x, matrix)

    expected = rounded_activations(x, matrix.c.group) @ weight.dequantize().double().T
    expected += random_matrix(1, 80, seed=2)
    # Scales of float32 are rounded to 11 bits, and shifts beside the larger of both; factors are not.
    is_rounded = form.scale_dtype == "float32" and matrix.c.scale_groups > 0
    tolerance = 1e-3 if is_rounded else 1e-5
    assert matrix.format == form
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("form", STORED.values(), ids=STORED)
def test_gate_and_up_of_a_checkpoint_are_interleaved_with_their_scales(form):
    weight = stored(form, 128, 192)

    rows = PackedMatrix(LIBRARY, weight, INT8_GROUPS)
    tiles = PackedMatrix(LIBRARY, weight, INT8_GROUPS, gated=True)

    x = random_matrix(5, 192)
    order = torch.arange(128).view(2, -1, 16).transpose(0, 1).flatten()
    assert torch.equal(multiply_packed(x, tiles), multiply_packed(x, rows)[:, order])


@pytest.mark.parametrize(
    "name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "AWQ", "8 bits by row, zeros", "groups of 48"]
)
def test_a_row_has_the_same_bits_beside_any_others(name):
    matrix = PackedMatrix(LIBRARY, stored(STORED[name], 96, 192), INT8_GROUPS)
    x = random_matrix(23, 192)
    together = multiply_packed(x, matrix, threads=3)

    for row in range(0, 23, 5):
        assert torch.equal(multiply_packed(x[row : row + 1], matrix), together[row : row + 1])


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e-7, 1e4, 1e6, 1e30])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "4 bits by row, zeros"])
def test_scales_that_float16_does_not_hold_keep_their_precision(name, size):
    weight = stored(STORED[name], 40, 96)
    for scale in weight.scales.values():
        scale.mul_(size)
    x = random_matrix(2, 96)

    found = multiply_packed(x, PackedMatrix(LIBRARY, weight, INT8_GROUPS))

    group = 16 if name == "Q6_K" else 32
    expected = rounded_activations(x, group) @ weight.dequantize().double().T
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("exponent", [-90, -25, -15, 15, 25, 90])
def test_weights_of_any_size_are_rounded_with_the_same_precision(exponent, bits):
    weight, x, size = random_matrix(40, 96), random_matrix(2, 96, seed=1), 2.0**exponent

    found = multiply(x, weight * size, bits)

    assert torch.equal(found / size, multiply(x, weight, bits))


def test_weights_of_the_checkpoint_with_more_bits_than_the_setting_are_rounded():
    weight = stored(STORED["Q8_0"], 40, 96)

    assert PackedMatrix(LIBRARY, weight, INT8_GROUPS).format == weight.format
    assert PackedMatrix(LIBRARY, weight, INT4_GROUPS).format == INT4_GROUPS
    assert PackedMatrix(LIBRARY, stored(STORED["Q4_1"], 40, 96), INT4_GROUPS).format.shifts


@pytest.mark.parametrize(
    "form", [FP8_ROWS, group_format(4, 24, offset=8), group_format(8, 8)], ids=["fp8", "24", "8"]
)
def test_formats_that_are_not_read_are_rounded(form):
    assert not is_read_by_library(form)
    weight = quantize(random_matrix(40, 96), FP8_ROWS) if form.float else stored(form, 40, 96)

    assert PackedMatrix(LIBRARY, weight, INT8_GROUPS).format == INT8_GROUPS


def test_a_matrix_of_q8_0_that_was_made_full_numbers_gets_its_numbers_back():
    weight = quantize(random_matrix(64, 128), INT8_GROUPS)

    again = quantize(weight.dequantize(), INT8_GROUPS)

    assert torch.equal(again.numbers, weight.numbers)
    assert torch.equal(again.scale, weight.scale)
