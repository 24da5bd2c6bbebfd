"""Projections by weights whose columns have an order: inputs are gathered before the product, after the norm."""

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE, CPU
from kernels.linear.projection import (
    SWIGLU,
    LinearWeights,
    Norm,
    Operations,
    Purpose,
    Residual,
    bind_projection,
    linear_problem,
)
from kernels.weight_format import FP8_ROWS, INT4_GROUPS
from kernels.weights import Weight, quantize
from tests.kernels import triton_interpreter

OUTPUTS, INPUTS = 64, 96
GROUPS = dataclasses.replace(INT4_GROUPS, shifts=True)


def ordered(form):
    """Return a matrix with an order, and one with the same values as full numbers."""
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn((OUTPUTS, INPUTS), generator=generator), form)
    sorted_ = weight.with_columns_sorted(torch.randperm(INPUTS, generator=generator).int())
    return sorted_, Weight.full(sorted_.dequantize())


def bind(weight, arch, *, dtype=torch.float32, purpose=Purpose.SERVING, **operations):
    bias = torch.linspace(-1, 1, OUTPUTS, dtype=dtype)
    arguments = Operations(**operations)
    return bind_projection(LinearWeights(weight, bias), dtype, arch, arguments, purpose=purpose)


@pytest.mark.parametrize("form", [FP8_ROWS, GROUPS], ids=lambda it: it.name)
@pytest.mark.parametrize(
    "arch",
    [CPU, pytest.param(CATALOGUE["a100"], marks=triton_interpreter.interpreted)],
    ids=lambda it: it.key,
)
@pytest.mark.parametrize("rows", [1, 7])
def test_every_use_of_a_projection_is_that_of_the_matrix_in_its_own_order(form, arch, rows):
    x = torch.randn((rows, INPUTS), generator=torch.Generator().manual_seed(1))
    norm = Norm(torch.linspace(0.5, 2, INPUTS), 1e-5)
    found, expected = [], []
    for its, weight in zip((found, expected), ordered(form), strict=True):
        its.append(bind(weight, arch)(x))
        reading = bind(weight, arch, norm=norm, activation=SWIGLU)
        its.append(reading.from_residual(Residual(x.clone()))[0])
        adding = bind(weight, arch, residual=True)
        hidden, parts, _ = adding.to_residual(x, Residual(torch.ones((rows, OUTPUTS))))
        its.append(hidden if parts is None else hidden + parts.sum(0))
        its.append(adding.partials(x).sum(0))
        tokens, logprobs = torch.empty(rows, dtype=torch.long), torch.empty(rows)
        its.append(bind(weight, arch).argmax(x, torch.empty((rows, OUTPUTS)), tokens, logprobs))

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@triton_interpreter.interpreted
def test_a_batch_invariant_projection_gathers_too():
    x = torch.randn((5, INPUTS), generator=torch.Generator().manual_seed(1))
    found, expected = (
        bind(weight, CATALOGUE["a100"], purpose=Purpose.DETERMINISTIC_SERVING)(x)
        for weight in ordered(GROUPS)
    )

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_the_problem_says_that_inputs_are_gathered_and_has_the_format_of_the_sorted_columns():
    weight, _ = ordered(GROUPS)

    problem = linear_problem(LinearWeights(weight), Operations(), torch.bfloat16)

    assert problem.ordered
    assert problem.format == GROUPS
    assert str(problem) == "1 x 96 to 64 in bfloat16, weights in int4, inputs in another order"
