"""Quantization of weights, and products with packed matrices of any size."""

import pytest
import torch

from kernels.cpu.decoder import CPUDecoder, DecoderShape
from kernels.cpu.library import load
from kernels.cpu.matrix import PackedMatrix
from kernels.weight_format import INT4_GROUPS, INT8_ROWS
from kernels.weights import Weight, quantize
from tests.kernels.cpu.reference import FORMATS, product, rounded_activations, rounded_weights

LIBRARY = load()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))


def random_matrix(rows, columns, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def multiply(x, weight, bits, bias=None, threads=2):
    """Multiply through a decoder without layers, whose head is the matrix."""
    matrix = PackedMatrix(LIBRARY, Weight.full(weight), FORMATS[bits], bias)
    shape = DecoderShape(weight.shape[1], 64, 2, 2, 32, 1e-6, 1.0, ())
    norm = torch.ones(weight.shape[1])
    return CPUDecoder(shape, [], norm, matrix, matrix, threads).project(x)


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


def test_int8_weights_have_at_most_half_a_step_of_error():
    weight = random_matrix(50, 256)

    rounded = quantize(weight, INT8_ROWS)

    assert rounded.numbers.dtype is torch.uint8
    assert rounded.numbers.min() >= 1
    assert ((rounded_weights(weight, 8) - weight).abs() <= 0.5001 * rounded.scale[:, None]).all()


def test_int4_scales_have_no_larger_error_than_those_of_the_extreme_number():
    weight = random_matrix(50, 256)
    groups = weight.view(50, -1, 32)
    plain_scale = (groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8).half().float()
    plain = torch.round(groups / plain_scale).clamp(-8, 7) * plain_scale

    numbers = quantize(weight, INT4_GROUPS).unpacked()

    assert numbers.max() <= 15
    error = (rounded_weights(weight, 4) - weight).view(50, -1, 32).square().sum(-1)
    assert (error <= (plain - groups).square().sum(-1) * 1.0001).all()
    assert error.sum() < 0.95 * (plain - groups).square().sum()


def test_activations_lose_at_most_half_a_step_of_their_group():
    x = random_matrix(4, 256) * torch.logspace(-3, 3, 256)

    error = (rounded_activations(x, 8) - x).abs().view(4, -1, 64)

    assert (error <= x.view(4, -1, 64).abs().amax(-1, keepdim=True) / 127 * 0.5001).all()


def test_a_packed_matrix_has_eight_or_four_and_a_half_bits_for_each_weight():
    weight = Weight.full(random_matrix(64, 128))

    assert PackedMatrix(LIBRARY, weight, INT8_ROWS).num_bytes == 64 * 128 + 64 * 4
    assert (
        PackedMatrix(LIBRARY, weight, INT4_GROUPS).num_bytes == 64 * 128 // 2 + 64 * 128 // 32 * 2
    )
