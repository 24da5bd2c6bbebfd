"""The product of weights in groups on a CPU, for few rows: 4 bits and FP8, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.group_tiles import reads
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import GROUPS
from kernels.linear.select import LinearChoice
from kernels.linear.weights import LinearArguments, LinearWeights
from kernels.weight_format import WeightFormat
from kernels.weights import Weight
from tests.kernels.references import reference
from tests.kernels.triton_interpreter import HAS_TRITON

if HAS_TRITON:
    from kernels.linear.gpu import groups
    from tests.kernels.linear.groups_on_cpu import GroupsOnCPU

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")
FORMATS = {
    "fp8 in blocks of 128": WeightFormat("fp8-blocks", 8, 128, "block"),
    "fp8 in blocks of 64, bfloat16": WeightFormat("fp8-blocks", 8, 64, "block", scale_dtype="bfloat16"),
    "fp8 in groups of 128": WeightFormat("fp8-groups", 8, 128, "group"),
    "fp8 in groups of 192": WeightFormat("fp8-groups", 8, 192, "group"),
    "4 bits in groups of 128": WeightFormat("int4", 4, 128, "group", False, False, 8, "float16"),
    "4 bits in groups of 32 with shifts": WeightFormat("int4", 4, 32, "group", True, False, 0),
}  # fmt: skip
SHAPES = {  # outputs, inputs: one step, an incomplete one, several, and rows and columns behind the last tile
    "one step": (16, 128),
    "less than a step": (40, 96),
    "several steps": (72, 1056),
    "incomplete blocks": (200, 1376),
}
SCALE = 2.0**-4
MANY = torch.finfo(torch.float8_e4m3fn).max


@pytest.fixture
def kernel(monkeypatch):
    """Return what takes the place of the kernel."""
    kernel = GroupsOnCPU()
    monkeypatch.setattr(groups, "group_linear", kernel)
    return kernel


def whole_numbers(*shape, seed, dtype=torch.bfloat16):
    """Return random numbers whose products and sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


class Layer:
    """A projection with random weights; `kind` is "plain", "bias", "gated" or "residual".

    Args:
        exact: whether its weights and their scales are such that products and sums are exact.
    """

    def __init__(self, kind, form, outputs, inputs, rows, dtype=torch.bfloat16, *, exact=True):
        self.kind, self.dtype = kind, dtype
        generator = torch.Generator().manual_seed(1)
        stacked = outputs * (1 + (kind == "gated"))
        self.weight = Weight.empty(form, (stacked, inputs), "cpu")
        if not form.float:
            self.weight.numbers.random_(0, 256, generator=generator)
        elif exact:
            self.weight.numbers.copy_(whole_numbers(stacked, inputs, seed=4))
        else:
            wide = torch.randn((stacked, inputs), generator=generator) * 100
            self.weight.numbers.copy_(wide.clamp(-MANY, MANY))
        for scale in self.weight.scales.values():
            random = torch.rand(scale.shape, generator=generator)
            scale.copy_((1 + (random > 0.5)) * SCALE if exact else random * 2e-3)
        self.bias = whole_numbers(stacked, seed=2, dtype=dtype) if kind == "bias" else None
        self.hidden = whole_numbers(rows, outputs, seed=5, dtype=dtype)
        problem = LinearProblem(
            rows, outputs, inputs, str(dtype).removeprefix("torch."), kind == "gated", form,
            bias=kind == "bias", residual=kind == "residual",
        )  # fmt: skip
        self._linear = groups.GroupsLinear(LinearWeights(self.weight, self.bias), problem)
        self._choice = LinearChoice(problem, GROUPS, None, "for the test")

    def __call__(self, x, *, pdl=False):
        hidden = self.hidden.clone() if self.kind == "residual" else None
        return self._linear(x, self._choice, hidden, LinearArguments(residual=hidden, pdl=pdl))

    def formula(self, x):
        """Return the result in float64."""
        y = x.double() @ self.weight.dequantize().double().T
        if self.kind == "gated":
            return reference.silu_and_mul(y, torch.float64)
        y = y if self.bias is None else y + self.bias.double()
        return y + self.hidden.double() if self.kind == "residual" else y


@needs_triton
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("rows", [1, 8, 11, 16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["plain", "bias", "gated", "residual"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_output_is_the_formula(kernel, dtype, kind, shape, rows, form):
    assert reads(form)
    layer = Layer(kind, form, *shape, rows, dtype)
    x = whole_numbers(rows, shape[1], seed=3, dtype=dtype)

    found, expected = layer(x, pdl=True), layer.formula(x)

    assert found.dtype is dtype
    assert kernel.loads_ahead > 0
    if kind == "gated":
        # silu has errors of float32 before it is rounded, and the exponential of a large number is infinite there.
        error = (found.double() - expected).abs()
        least = max(torch.finfo(dtype).tiny, 1e-30)
        assert bool((error <= 0.501 * torch.finfo(dtype).eps * expected.abs() + least).all())
    else:
        assert torch.equal(found, expected.to(dtype))


@needs_triton
@pytest.mark.parametrize(
    "form", [it for it in FORMATS.values() if it.float], ids=lambda it: it.name
)
def test_any_numbers_in_fp8_are_as_exact_as_float32(kernel, form):
    """Only the result is rounded: numbers and scales are exact, also scales of other magnitudes beside each other."""
    layer = Layer("plain", form, 200, 1376, 5, torch.float16, exact=False)
    layer.weight.scale[:, ::2] *= 2.0**-8
    x = torch.randn((5, 1376), generator=torch.Generator().manual_seed(3)).half()
    expected = layer.formula(x)

    error = (layer(x).double() - expected).abs()

    assert bool((error <= 0.501 * 2.0**-10 * expected.abs() + 1e-5).all())


@needs_triton
def test_a_row_does_not_depend_on_the_others(kernel):
    layer = Layer("plain", FORMATS["fp8 in blocks of 128"], 200, 1376, 8)
    x = whole_numbers(8, 1376, seed=3)
    others = torch.full_like(x, torch.nan)
    others[3] = x[3]

    assert torch.equal(layer(others)[3], layer(x)[3])


@needs_triton
def test_the_first_loads_of_weights_do_not_wait_for_the_earlier_kernel(kernel):
    layer = Layer("plain", FORMATS["fp8 in blocks of 128"], 16, 2048, 1)
    x = whole_numbers(1, 2048, seed=3)

    layer(x)
    assert kernel.loads_ahead == 0
    layer(x, pdl=True)
    # Numbers and scales of four chunks of each warp.
    assert kernel.loads_ahead == 2 * 4


@pytest.mark.parametrize(
    ("form", "is_read"),
    [
        (WeightFormat("fp8", 8, 128, "block"), True),
        (WeightFormat("fp8", 8, 64, "group", scale_dtype="bfloat16"), True),
        (WeightFormat("fp8", 8, 1024, "group"), True),
        (WeightFormat("fp8", 8, 32, "group"), False),
        (WeightFormat("fp8", 8, 96, "block"), False),
        (WeightFormat("fp8", 8, 128, "block", shifts=True), False),
        (WeightFormat("fp8", 8, scales="row"), False),
        (WeightFormat("int8", 8, 128, "group", float=False), False),
        (WeightFormat("int8", 8, 128, "block", float=False), False),
        (WeightFormat("int4", 4, 128, "block", float=False, offset=8), False),
        (WeightFormat("int4", 4, 32, "group", float=False, offset=8), True),
        (WeightFormat("int4", 4, 96, "group", float=False, offset=8), False),
        (WeightFormat("bfloat16", 16), False),
    ],
    ids=str,
)
def test_the_formats_that_are_read(form, is_read):
    assert reads(form) is is_read
