"""Batch-invariant linear layers in Triton's interpreter: accuracy, and the same bits among any other rows."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.arch import CATALOGUE, CPU
from kernels.errors import NoKernelError
from kernels.fp8 import quantize_rows
from kernels.linear.gpu.invariant import InvariantLinear, num_splits
from kernels.linear.persistent_tiles import INVARIANT_FEWEST_ROWS
from kernels.linear.problem import LinearProblem
from kernels.linear.select import select_linear
from kernels.linear.weights import LinearArguments
from kernels.weight_format import FP8_ROWS
from tests.kernels import triton_interpreter
from tests.kernels.linear.weights import linear_weights
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than

pytestmark = triton_interpreter.interpreted

ARCHS = {"plain": "h100", "fp8": "l4", "fp8 by hand": "a100"}


@pytest.fixture(autouse=True)
def _poison():
    torch.manual_seed(0)
    with triton_interpreter.poisoned_memory():
        yield


class Layer:
    """A layer bound to random weights."""

    def __init__(self, outputs, inputs, dtype="bfloat16", kind="plain", **more):
        self.dtype = getattr(torch, dtype)
        weight, scale = torch.randn(outputs, inputs) * inputs**-0.5, None
        self.truth = weight
        if kind != "plain":
            weight, scale = quantize_rows(weight)
            self.truth = reference.dequantize(weight, scale)
            more["format"] = FP8_ROWS
        else:
            weight = weight.to(self.dtype)
            self.truth = weight.float()
        self.bias = torch.randn(outputs).to(self.dtype) if more.get("bias") else None
        problem = LinearProblem(1, outputs, inputs, dtype, batch_invariant=True, **more)
        self.arch = CATALOGUE[ARCHS[kind]]
        self.problem = problem
        self.layer = InvariantLinear(linear_weights(weight, self.bias, scale), problem)

    def __call__(self, x, out=None):
        problem = LinearProblem(
            len(x), **{f: getattr(self.problem, f) for f in self.problem.__slots__ if f != "rows"}
        )
        choice = select_linear(problem, self.arch)
        assert choice.spec.name == "invariant"
        return self.layer(x, choice, out, LinearArguments())

    def formula(self, x, dtype):
        result = x.to(dtype) @ self.truth.to(dtype).T
        return result if self.bias is None else result + self.bias.to(dtype)


@pytest.mark.parametrize("kind", list(ARCHS))
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 136), (64, 1024), (130, 72)])
@pytest.mark.parametrize("residual", [False, True], ids=["", "parts"])
def test_a_layer_agrees_with_the_formula(outputs, inputs, kind, biased, residual):
    layer = Layer(outputs, inputs, kind=kind, bias=biased, residual=residual)
    if kind == "plain":
        layer.arch = CATALOGUE["a100"]
    x = torch.randn(70, inputs).to(layer.dtype)

    out = layer(x)

    out = out.sum(0).to(layer.dtype) if residual else out
    assert_no_worse_than(out, layer.formula(x, torch.float32), layer.formula(x, layer.dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "parts"])
def test_a_row_has_the_same_bits_among_any_number_of_others(dtype, residual):
    layer = Layer(72, 1032, dtype, residual=residual)
    layer.arch = CATALOGUE["a100"]
    x = torch.randn(140, 1032).to(layer.dtype)
    whole = layer(x)

    for first, stop in ((0, 1), (3, 4), (7, 70), (139, 140), (20, 133)):
        assert torch.equal(layer(x[first:stop]), whole[..., first:stop, :])


def test_the_output_may_be_given_and_the_rows_may_lie_apart():
    layer = Layer(72, 136)
    layer.arch = CATALOGUE["a100"]
    around = torch.full((5, 150), float("nan"), dtype=layer.dtype)
    around[:, :136] = torch.randn(5, 136)
    out = torch.full((5, 72), float("nan"), dtype=layer.dtype)

    assert layer(around[:, :136], out) is out
    assert torch.equal(out, layer(around[:, :136].contiguous()))


@pytest.mark.parametrize("outputs", [64, 576, 1024, 4096, 100])
@pytest.mark.parametrize("inputs", [64, 576, 3072, 14336, 100])
def test_layers_with_few_outputs_are_split_into_parts_that_are_worth_a_program(outputs, inputs):
    splits = num_splits(outputs, inputs, 64)

    assert splits in (1, 2, 4)
    assert splits == 1 or inputs // splits >= 256
    assert splits == 1 or outputs // 64 * splits <= 128


@pytest.mark.parametrize(
    ("more", "arch", "chosen"),
    [
        ({"layer_weights": 1 << 20}, "h100", "matrix"),
        ({}, "h100", "matrix"),
        ({"bias": True, "residual": True, "layer_weights": 1}, "h100", "invariant"),
        ({"format": FP8_ROWS}, "h100", "invariant"),
        ({}, "a100", "invariant"),
        ({}, "rtx5090", "invariant"),
    ],
)
def test_the_kernel_of_a_batch_invariant_layer_depends_on_the_rows_only_where_two_have_the_same_bits(
    more, arch, chosen
):
    for rows in (1, 2, 4, 5, 16, 255, 256, 257, 10_000):
        problem = LinearProblem(rows, 1024, 512, batch_invariant=True, **more)

        many = rows >= INVARIANT_FEWEST_ROWS and chosen == "matrix"
        expected = "persistent" if many else chosen
        assert select_linear(problem, CATALOGUE[arch]).spec.name == expected


@pytest.mark.parametrize("arch", [CPU, CATALOGUE["t4"]], ids=str)
def test_processors_without_a_batch_invariant_product_are_refused_with_every_reason(arch):
    with pytest.raises(NoKernelError, match="batch invariant") as raised:
        select_linear(LinearProblem(1, 64, 64, batch_invariant=True), arch)

    for row in ("vector", "matrix", "invariant", "library", "packed", "pytorch"):
        assert re.search(rf"[:;] {row}: ", str(raised.value))
