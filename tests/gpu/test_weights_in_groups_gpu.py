"""Weights in groups and blocks on a GPU, 4 bits and FP8: products of any number of rows, and the step in one launch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import kernels
from kernels.arch import HOPPER
from kernels.linear.gpu.dequantize import dequantize
from kernels.linear.problem import LinearProblem
from kernels.linear.select import select_linear
from kernels.linear.weights import LinearArguments, LinearWeights
from kernels.selection import load
from kernels.step.single_launch import (
    LayerWeights,
    StepShape,
    StepWeights,
    bind_step,
    unsupported,
)
from kernels.weight_format import WeightFormat
from kernels.weights import Weight
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

FORMATS = {
    "groups of 128": WeightFormat("int4", 4, 128, "group", False, False, 8, "float16"),
    "groups of 32 with shifts": WeightFormat("int4", 4, 32, "group", True, False, 0, "float32"),
    "groups of 64 with shifts": WeightFormat("int4", 4, 64, "group", True, False, 8, "bfloat16"),
    "groups of 256": WeightFormat("int4", 4, 256, "group", False, False, 8, "float16"),
    "FP8 in blocks of 128": WeightFormat("fp8-blocks", 8, 128, "block"),
    "FP8 in groups of 128": WeightFormat("fp8-groups", 8, 128, "group", scale_dtype="bfloat16"),
    "FP8 in blocks of 64": WeightFormat("fp8-blocks", 8, 64, "block"),
}
STEP_FORMATS = {name: it for name, it in FORMATS.items() if not it.float or it.group % 128 == 0}

SHAPES = [
    (4096, 4096, False, True),
    (6144, 1024, True, False),
    (1024, 2112, False, False),
    (1000, 2144, False, False),
    (40, 1056, True, False),
    (72, 96, False, True),
]
STEPS = [
    StepShape(1024, 3072, 16, 8, 128, 5003, 1e-6, 128**-0.5),
    StepShape(2560, 9728, 32, 8, 128, 4096, 1e-6, 128**-0.5),
    StepShape(4096, 14336, 32, 8, 128, 4096, 1e-5, 128**-0.5),
    StepShape(896, 4864, 16, 2, 64, 4096, 1e-6, 0.125),
]
PAST = 100


def random_weight(form, outputs, inputs, seed=0):
    """Return weights of mean 0 and variance about 1 / inputs."""
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = Weight.empty(form, (outputs, inputs), "cuda")
    deviation = 100.0 if form.float else 5.0
    if form.float:
        numbers = torch.randn((outputs, inputs), device="cuda", generator=generator) * deviation
        weight.numbers.copy_(numbers.clamp(-448, 448))
    else:
        weight.numbers.random_(0, 256, generator=generator)
    size = torch.rand(weight.scale.shape, device="cuda", generator=generator) + 0.5
    weight.scale.copy_(size * inputs**-0.5 / deviation)
    if weight.shift is not None:
        weight.shift.copy_(weight.scale.float() * (form.offset - 7.5))
    return weight


def with_rounded_scales(weight, dtype):
    """Return weights whose scales and shifts are rounded to a dtype, as kernels for 4 bits have them.

    Those kernels multiply a number of 0 to 15 by the scale, and add the shift. Where the shift is -7.5 times the scale,
    rounding both adds (8.8^2 + 7.5^2)^1/2 / 4.6 = 2.5 times the error of rounding a weight: 8.8 is the root mean square
    of the numbers, and 4.6 that of weights in units of the scale. The largest errors of sums in float16, which are
    rounded too, are 1 to 2.4 times those with unrounded scales.
    """
    if weight.format.float:
        return weight  # of FP8, sums get the scale in float32
    shift = weight.shift
    return dataclasses.replace(
        weight,
        scale=weight.scale.to(dtype).to(weight.scale.dtype),
        shift=None if shift is None else shift.to(dtype).to(shift.dtype),
    )


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 64, 200, 256, 300])
@pytest.mark.parametrize(("outputs", "inputs", "gated", "residual"), SHAPES, ids=str)
def test_a_product_is_as_accurate_as_one_with_dequantized_weights(
    outputs, inputs, gated, residual, rows, dtype, form
):
    problem = LinearProblem(
        rows, outputs, inputs, str(dtype).removeprefix("torch."), gated, form,
        residual=residual, layer_weights=1,
    )  # fmt: skip
    choice = select_linear(problem, kernels.detect("cuda"))
    weight = random_weight(form, problem.matrices * outputs, inputs)
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(rows, inputs, device="cuda", generator=generator).to(dtype)
    hidden = torch.randn(rows, outputs, device="cuda", generator=generator).to(dtype)
    adds = residual and not choice.spec.leaves_partials

    product = load(choice.spec.target)(LinearWeights(weight), problem)
    found = product(x, choice, None, LinearArguments(residual=hidden if adds else None))

    def expected(kind, weight=weight):
        y = x.to(kind) @ weight.dequantize(kind).T
        if gated and choice.spec.absorbs_gate:
            y = reference.silu_and_mul(y, kind)
        return y + hidden.to(kind) if residual else y

    if residual and not adds:
        found = (found.sum(0) + hidden.float()).to(dtype)
    # A gate multiplies two such sums.
    factor = 3.0 if gated else 2.0
    plain = expected(dtype, with_rounded_scales(weight, dtype))
    assert_no_worse_than(found, expected(torch.float64).float(), plain, factor=factor)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_dequantized_weights_are_those_of_the_definition(form):
    weight = random_weight(form, 1000, 2144)

    torch.testing.assert_close(
        dequantize(weight, torch.bfloat16), weight.dequantize(torch.bfloat16), rtol=2**-7, atol=0
    )


class Step:
    """A decode step of one sequence as a single launch, of a model with two layers."""

    def __init__(self, shape, form, dtype, *, dense):
        self.shape, self.dtype = shape, dtype
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        queries = shape.num_heads * shape.head_dim
        sizes = (
            (heads, shape.hidden_size), (shape.hidden_size, queries),
            (2 * shape.inner_size, shape.hidden_size), (shape.hidden_size, shape.inner_size),
        )  # fmt: skip
        gain = torch.ones(shape.hidden_size, dtype=dtype, device="cuda")
        layers = []
        for number in range(2):
            made = [random_weight(form, *size, 4 * number + i) for i, size in enumerate(sizes)]
            if dense:
                made = [Weight.full(it.dequantize(dtype)) for it in made]
            layers.append(LayerWeights(*made, gain, gain, None, None, None))
        generator = torch.Generator("cuda").manual_seed(99)
        vocabulary = shape.vocab_size, shape.hidden_size
        embedding = torch.randn(vocabulary, device="cuda", generator=generator).to(dtype)
        weights = StepWeights(shape, layers, embedding, embedding, gain)
        cache = 2, PAST // 16 + 1, 16, shape.num_kv_heads, shape.head_dim
        caches = tuple(
            torch.randn(cache, device="cuda", generator=generator).to(dtype) for _ in layers
        )
        self.bound = bind_step(weights, caches, (None,) * 2, kernels.detect("cuda"))

    def __call__(self):
        """Return the logits."""
        shape = self.shape
        place = torch.tensor([PAST], device="cuda")
        blocks = torch.arange(PAST // 16 + 1, dtype=torch.int32, device="cuda")[None]
        angle = torch.arange(PAST + 1, device="cuda")[:, None, None] * torch.ones(
            shape.head_dim, device="cuda"
        )
        rope = torch.cos(angle).to(self.dtype), torch.sin(angle).to(self.dtype)
        logits = torch.full((1, shape.vocab_size), math.nan, dtype=self.dtype, device="cuda")
        token = torch.zeros(1, dtype=torch.int64, device="cuda")
        logprob = torch.zeros(1, device="cuda")
        self.bound(token, place, place.int(), blocks, rope, logits, token, logprob, token.clone())
        return logits


@pytest.mark.parametrize("form", STEP_FORMATS.values(), ids=STEP_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", STEPS, ids=lambda it: f"{it.hidden_size}x{it.inner_size}")
def test_a_step_in_one_launch_computes_the_same_as_with_dequantized_weights(shape, dtype, form):
    arch = kernels.detect("cuda")
    if reasons := arch.unsupported(HOPPER):
        pytest.skip(reasons[0])
    assert not unsupported(shape, dtype, arch, 1, form)
    step = Step(shape, form, dtype, dense=False)
    found, again = step().double(), step().double()
    expected = Step(shape, form, dtype, dense=True)().double()

    assert torch.equal(found, again)
    error = (found - expected).norm() / expected.norm()
    assert float(error) < (0.03 if dtype is torch.bfloat16 else 0.004)
