"""Every row of the registry and every format of weights: refused in words, read, or dequantized at each call."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE, CPU
from kernels.errors import ShapeError
from kernels.linear import group_tiles
from kernels.linear.problem import LinearProblem
from kernels.linear.pytorch import PyTorchLinear
from kernels.linear.registry import (
    GROUPS,
    INTEGERS,
    INVARIANT,
    LIBRARY,
    LIBRARY_FP8,
    REGISTRY,
)
from kernels.linear.select import LinearChoice, select_linear
from kernels.linear.weights import LinearArguments, LinearWeights
from kernels.weight_format import FP8_ROWS, INT4_GROUPS, INT8_ROWS, WeightFormat, unquantized
from kernels.weights import Weight
from tests.kernels import triton_interpreter
from tests.kernels.test_weights import random_weight

UNKNOWN = WeightFormat("a new format", 8, group=32, scales="block", shifts=True, float=False)
"""That no kernel reads."""
QUANTIZED = (FP8_ROWS, INT8_ROWS, INT4_GROUPS, UNKNOWN)
ARCHES = [*CATALOGUE.values(), CPU]
SHAPE = (64, 96)


@pytest.mark.parametrize("form", QUANTIZED, ids=lambda it: it.name)
@pytest.mark.parametrize("spec", REGISTRY, ids=lambda it: it.name)
def test_a_row_takes_a_format_or_refuses_it_by_name(spec, form):
    full = LinearProblem(16, *SHAPE, layer_weights=1, batch_invariant=spec is INVARIANT)
    arch = CPU if spec.name in ("packed", "pytorch", "cpu_integers") else CATALOGUE["h100"]

    more = set(spec.unsupported(dataclasses.replace(full, format=form), arch))

    more -= set(spec.limits(dataclasses.replace(full, format=form), arch))
    in_groups = spec.reads_groups and group_tiles.reads(form)
    if spec.formats is None or form in spec.formats or in_groups:
        assert not more
    else:
        reads_some = spec.formats or spec.reads_groups
        assert more == {f"no weights in {form.name}" if reads_some else "weights are quantized"}
    refused = "weights are not quantized" in spec.unsupported(full, arch)
    assert refused == (spec in (LIBRARY_FP8, GROUPS, INTEGERS))


@pytest.mark.parametrize("arch", ARCHES, ids=lambda it: it.key)
@pytest.mark.parametrize("rows", [1, 4, 64, 2000])
def test_a_format_that_no_kernel_reads_is_multiplied_on_every_processor(arch, rows):
    for dtype in ("bfloat16", "float16", "float32"):
        for gated in (False, True):
            asked = LinearProblem(rows, *SHAPE, dtype, gated, UNKNOWN, layer_weights=1)
            spec = select_linear(asked, arch).spec
            assert spec.name == ("pytorch" if arch.is_cpu or arch.sm < 80 else "library")
            if not arch.is_cpu and arch.sm >= 80:
                invariant = dataclasses.replace(asked, batch_invariant=True)
                assert select_linear(invariant, arch).spec is INVARIANT


@triton_interpreter.interpreted
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("form", QUANTIZED, ids=lambda it: it.name)
def test_pytorch_and_the_library_multiply_by_the_dequantized_weights(form, bias):
    from kernels.linear.library import LibraryLinear

    weight = random_weight(form, SHAPE)
    weights = LinearWeights(weight, torch.randn(64) if bias else None)
    exact = LinearWeights(Weight.full(weight.dequantize()), weights.bias)
    x = torch.randn(5, 96)
    found, expected = [], []
    for its, held in ((found, weights), (expected, exact)):
        problem = LinearProblem(5, *SHAPE, "float32", format=held.weight.format, bias=bias)
        choice = LinearChoice(problem, LIBRARY, None, "for the test")
        its.append(PyTorchLinear(held, problem)(x))
        its.append(LibraryLinear(held, problem)(x, choice, None, LinearArguments()))

    assert all(map(torch.equal, found, expected))


@triton_interpreter.interpreted
@pytest.mark.parametrize("form", QUANTIZED, ids=lambda it: it.name)
def test_deterministic_products_multiply_by_the_dequantized_weights(form):
    from kernels.linear.gpu.invariant import InvariantLinear

    weight, x = random_weight(form, SHAPE), torch.randn(5, 96)
    problem = LinearProblem(5, *SHAPE, "float32", format=form, batch_invariant=True)
    choice = select_linear(problem, CATALOGUE["h100"])

    found = InvariantLinear(LinearWeights(weight), problem)(x, choice, None, LinearArguments())

    assert choice.spec is INVARIANT
    expected = x.double() @ weight.dequantize().double().T
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4 * expected.abs().max())


@triton_interpreter.interpreted
def test_weights_that_do_not_fit_the_problem_are_refused():
    from kernels.linear.library import LibraryLinear

    weight, problem = random_weight(UNKNOWN, SHAPE), LinearProblem(1, *SHAPE, format=UNKNOWN)
    LibraryLinear(LinearWeights(weight), problem)

    for change in (
        {"format": FP8_ROWS},
        {"shape": (64, 95)},
        {"numbers": weight.numbers[:-1]},
        {"numbers": weight.numbers.int()},
        {"scale": weight.scale[:-1]},
        {"scale": None},
        {"shift": None},
        {"shift": weight.shift.t().contiguous()},
    ):
        with pytest.raises(
            ShapeError, match=r"weight is \[6[34], 9[65]?\] .*; the layer is 1 x 96"
        ):
            LibraryLinear(LinearWeights(dataclasses.replace(weight, **change)), problem)
    with pytest.raises(ShapeError, match=r"bias is \[63\]"):
        LibraryLinear(LinearWeights(weight, torch.ones(63)), problem)
    with pytest.raises(ShapeError):
        LibraryLinear(LinearWeights(weight), LinearProblem(1, *SHAPE))


def test_full_numbers_have_the_dtype_of_the_inputs():
    problem = LinearProblem(1, *SHAPE, "float16", format=unquantized("float32"))

    assert problem.format == unquantized("float16")
    assert dataclasses.replace(problem, dtype="bfloat16").format == unquantized("bfloat16")
    assert str(problem) == "1 x 96 to 64 in float16"
    asked = dataclasses.replace(problem, format=UNKNOWN)
    assert str(asked) == "1 x 96 to 64 in float16, weights in a new format"
