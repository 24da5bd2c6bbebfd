"""The int8 and int4 roundings that the CPU's kernels are compared with."""

import pytest
import torch

from kernels import weight_format
from kernels.weight_format import INT8_GROUPS
from kernels.weights import quantize
from tests.kernels.references.quantized_reference import (
    INT4_GROUPS,
    dequantize_int8,
    multiply,
    quantize_int4,
    quantize_int8,
)


@pytest.fixture
def weight():
    return torch.randn(48, 256, generator=torch.Generator().manual_seed(0)) * 0.02


@pytest.mark.parametrize("group", [None, 64, 32])
def test_an_int8_number_is_at_most_half_a_step_of_its_group_away(weight, group):
    numbers, scale = quantize_int8(weight, group)

    steps = scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    assert numbers.dtype is torch.int8
    assert scale.shape == (48, 256 // (group or 256))
    assert ((dequantize_int8(numbers, scale) - weight).abs() <= 0.5001 * steps).all()
    largest = numbers.unflatten(-1, (-1, group or 256)).abs().amax(-1)
    assert (largest == 127).all()


def test_int8_numbers_are_symmetric_and_rounded_half_to_even():
    numbers, scale = quantize_int8(torch.tensor([[127.0, -127.0, 0.5, 1.5, -0.5, -1.5, 2.5, -2.5]]))

    assert numbers.tolist() == [[127, -127, 0, 2, 0, -2, 2, -2]]
    assert scale.tolist() == [[1.0]]


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38])
def test_groups_of_zeros_and_of_subnormal_numbers_become_zeros(size):
    rows = torch.full((2, 64), size)

    assert dequantize_int8(*quantize_int8(rows, 32)).eq(0).all()
    assert quantize_int4(rows).dequantize().eq(0).all()


@pytest.mark.parametrize("group", INT4_GROUPS)
def test_an_int4_group_holds_its_largest_value_and_fits_the_others(weight, group):
    rounded = quantize_int4(weight, group, refined=False)

    assert rounded.unpacked().max() <= 15
    scale = rounded.scale
    assert torch.equal(scale, scale.half().float())
    error = (rounded.dequantize() - weight).unflatten(-1, (-1, group)).abs()
    extreme = weight.unflatten(-1, (-1, group)).abs().argmax(-1, keepdim=True)
    assert (error.gather(-1, extreme)[..., 0] <= 0.01 * scale.abs()).all()
    # A value near the extreme of the other sign is rounded to 7 scales, at most one away.
    assert (error <= 1.01 * scale.abs()[..., None]).all()


@pytest.mark.parametrize("group", INT4_GROUPS)
def test_least_squares_reduces_the_int4_error_of_every_group(weight, group):
    def errors(refined):
        rounded = quantize_int4(weight, group, refined=refined).dequantize()
        error = weight.abs() * (rounded - weight).square()
        return error.unflatten(-1, (-1, group)).sum(-1)

    plain, refined = errors(refined=False), errors(refined=True)
    assert (refined <= plain).all()
    assert refined.sum() < 0.9 * plain.sum()


def test_int4_weights_that_have_16_values_are_exact():
    numbers = torch.arange(16).repeat(4, 4)
    weight = (numbers - 8) * torch.tensor([0.5, -0.25, 2.0, -1.0])[:, None]

    assert torch.equal(quantize_int4(weight).dequantize(), weight)


def test_a_row_of_activations_does_not_depend_on_the_other_rows(weight):
    alone = quantize_int8(weight[3:4], 64)
    together = quantize_int8(weight, 64)

    assert torch.equal(alone[0][0], together[0][3])
    assert torch.equal(alone[1][0], together[1][3])


def test_products_have_the_errors_of_their_roundings(weight):
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ weight.double().T

    def relative(result):
        return float((result - exact).norm() / exact.norm())

    assert relative(multiply(x, quantize(weight, INT8_GROUPS))) < 0.012
    assert relative(multiply(x, quantize_int4(weight), group=32)) < 0.1


def test_inputs_that_are_no_multiple_of_the_group_are_an_error():
    with pytest.raises(AssertionError, match="48 is no multiple of 32"):
        quantize_int4(torch.zeros(1, 48))


def test_the_librarys_8_bit_weights_are_those_of_the_reference(weight):
    rounded = quantize(weight, INT8_GROUPS)
    expected, expected_scale = quantize_int8(weight, INT8_GROUPS.group)

    # The library's scales have 11 bits, so a number half-way between two may become the other.
    difference = (rounded.numbers.int() - 128 - expected.int()).abs()
    assert difference.max() <= 1
    assert difference.float().mean() < 2e-2
    torch.testing.assert_close(rounded.scale, expected_scale, rtol=2**-10, atol=0)


def test_the_librarys_4_bit_weights_are_almost_as_exact_as_those_of_the_reference(weight):
    def error(rounded):
        return float((weight.abs() * (rounded - weight).square()).sum())

    expected = error(quantize_int4(weight).dequantize())
    assert error(quantize(weight, weight_format.INT4_GROUPS).dequantize()) < 1.05 * expected
