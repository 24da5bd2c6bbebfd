"""The matrix product on a CPU: results, rings of every size, partial sums and stores."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from kernels.linear import matrix_tiles
from kernels.linear.matrix_tiles import (
    MANY_ROWS,
    ROW_COUNTS,
    MatrixLaunch,
    plan_invariant_matrix,
    plan_matrix,
)
from kernels.linear.problem import LinearProblem
from kernels.linear.weights import LinearArguments, LinearWeights
from kernels.weight_format import FP8_ROWS, WeightFormat
from kernels.weights import Weight
from tests.kernels.linear.weights import linear_weights
from tests.kernels.references import reference
from tests.kernels.triton_interpreter import HAS_TRITON

if HAS_TRITON:
    from kernels.linear.gpu import matrix
    from tests.kernels.linear.matrix_on_cpu import MatrixOnCPU

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

KINDS = ("plain", "bias", "gated", "residual")
SCALE = 2.0**-4
RINGS = {  # outputs of a program, columns of a chunk, chunks of a split, stages
    "one chunk": (64, 128, 1, 1),
    "as many stages as chunks": (64, 64, 3, 3),
    "one chunk more than two stages": (128, 64, 3, 2),
    "one chunk more than three stages": (64, 128, 4, 3),
    "two stages": (64, 64, 7, 2),
    "three stages": (128, 64, 8, 3),
}
ROWS = (  # rows, those of a program, dtype, pdl
    (5, 16, torch.bfloat16, True),
    (16, 16, torch.float16, False),
    (33, 64, torch.float16, True),
    (64, 64, torch.bfloat16, True),
    (100, 64, torch.bfloat16, False),
    (129, 128, torch.bfloat16, True),
    (256, 256, torch.float16, True),
)


GROUPS = {
    "4 bits in groups of 32": WeightFormat("int4", 4, 32, "group", True, False, 0, "float16"),
    "4 bits in groups of 64": WeightFormat("int4", 4, 64, "group", False, False, 8, "float16"),
    "4 bits in groups of 128": WeightFormat("int4", 4, 128, "group", True, False, 8, "float16"),
    "4 bits in groups of 256": WeightFormat("int4", 4, 256, "group", False, False, 0, "float16"),
    "fp8 in blocks of 128": WeightFormat("fp8-blocks", 8, 128, "block"),
    "fp8 in blocks of 256": WeightFormat("fp8-blocks", 8, 256, "block", scale_dtype="bfloat16"),
    "fp8 in groups of 128": WeightFormat("fp8-groups", 8, 128, "group"),
}


@pytest.fixture
def kernel(monkeypatch):
    """Return what takes the place of the kernel."""
    kernel = MatrixOnCPU()
    monkeypatch.setattr(matrix, "matrix_linear", kernel)
    return kernel


@pytest.fixture
def plan(monkeypatch):
    """Return a function that decides about the tiles and the stages of the layers that are bound next."""

    def plan(launch, stages):
        monkeypatch.setattr(matrix_tiles, "_SHARED_BYTES", stages * launch.chunk_bytes)
        monkeypatch.setattr(matrix, "plan_matrix", lambda *_, **__: launch)

    return plan


def whole_numbers(*shape, seed, dtype=torch.bfloat16):
    """Return random numbers whose products and sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


class Layer:
    """A projection of one kind with random weights; `outputs` is the number of their rows.

    Where `fp8`, the scales of neighbouring rows differ.
    """

    def __init__(
        self,
        kind,
        outputs,
        inputs,
        dtype=torch.bfloat16,
        *,
        scale=SCALE,
        invariant=False,
        fp8=False,
    ):
        self.kind, self.dtype = kind, dtype
        numbers = whole_numbers(outputs, inputs, seed=1, dtype=dtype)
        self.weight = numbers * scale
        self.bias = whole_numbers(outputs, seed=2, dtype=dtype) if kind == "bias" else None
        gated = kind == "gated"
        problem = LinearProblem(
            1, outputs // (1 + gated), inputs, gated=gated, bias=kind == "bias",
            residual=kind == "residual", layer_weights=1, batch_invariant=invariant,
            dtype=str(dtype).removeprefix("torch."),
        )  # fmt: skip
        weights = linear_weights(self.weight, self.bias)
        if fp8:
            scales = scale * 2.0 ** -(torch.arange(outputs) % 3)
            self.weight = numbers * scales[:, None].to(dtype)
            weights = linear_weights(numbers.to(torch.float8_e4m3fn), self.bias, scales)
            problem = dataclasses.replace(problem, format=FP8_ROWS)
        self.linear = matrix.MatrixLinear(weights, problem)

    def __call__(self, x, out=None, *, pdl=False):
        return self.linear(x, None, out, LinearArguments(pdl=pdl))

    def check(self, x, found, splits=1):
        """Check that a result is the formula in float64, rounded; silu has errors of float32 before it is rounded."""
        parts = x.double().unflatten(1, (splits, -1)).transpose(0, 1)
        parts = parts @ self.weight.double().unflatten(1, (splits, -1)).permute(1, 2, 0)
        if self.kind == "residual":
            assert found.dtype is torch.float32
            assert torch.equal(found.double(), parts)
            return
        (expected,) = parts
        assert found.dtype is self.dtype
        assert found.shape[1] == expected.shape[1] // (1 + (self.kind == "gated"))
        if self.kind == "gated":
            expected = reference.silu_and_mul(expected, torch.float64)
            info = torch.finfo(self.dtype)
            error = (found.double() - expected).abs()
            # The exponential of a large number is infinite in float32.
            least = max(info.tiny, 1e-30)
            assert bool((error <= 0.501 * info.eps * expected.abs() + least).all())
            return
        expected += 0 if self.bias is None else self.bias.double()
        assert torch.equal(found, expected.to(self.dtype))


@needs_triton
@pytest.mark.parametrize(("rows", "row_tile", "dtype", "pdl"), ROWS, ids=str)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize(
    ("kind", "splits"),
    [("plain", 1), ("bias", 1), ("gated", 1), ("residual", 1), ("residual", 2), ("residual", 4)],
)
def test_every_output_is_the_formula(
    kernel, plan, kind, splits, fp8, ring, rows, row_tile, dtype, pdl
):
    outputs, columns, chunks, stages = RINGS[ring]
    launch = MatrixLaunch(outputs, row_tile, columns, splits, 8 if fp8 else 16)
    plan(launch, stages)
    inputs = splits * chunks * columns
    layer = Layer(kind, 2 * outputs, inputs, dtype, fp8=fp8)
    assert launch.stages(inputs) == stages
    x = whole_numbers(rows, inputs, seed=3, dtype=dtype)

    found = layer(x, pdl=pdl)

    assert kernel.grids == [(-(-rows // row_tile), 2, splits)]
    layer.check(x, found, splits)


@needs_triton
@pytest.mark.parametrize("rows", [1, 17, 65, 130, 256])
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize(
    ("kind", "outputs", "inputs"),
    [
        ("plain", 192, 320), ("bias", 64, 64), ("gated", 320, 640), ("gated", 128, 64),
        ("residual", 192, 768), ("residual", 256, 1024),
    ],
)  # fmt: skip
def test_planned_tiles_compute_the_formula(kernel, kind, outputs, inputs, fp8, rows):
    layer = Layer(kind, outputs, inputs, fp8=fp8)
    x = whole_numbers(rows, inputs, seed=3)
    found = layer(x, pdl=True)

    ((_, _, splits),) = kernel.grids
    layer.check(x, found, splits)


@needs_triton
def test_sums_of_any_numbers_are_as_exact_as_float32(kernel):
    layer = Layer("residual", 128, 640, torch.float16)
    generator = torch.Generator().manual_seed(0)
    layer.weight.copy_(torch.randn(128, 640, generator=generator) / 25)
    x = torch.randn(40, 640, generator=generator).half()

    found = layer(x).double().sum(0)

    error = (found - x.double() @ layer.weight.double().T).abs()
    assert float(error.max()) < 1e-5


@needs_triton
def test_a_gate_far_from_zero_does_not_overflow(kernel):
    layer = Layer("gated", 128, 640, scale=2.0)
    x = whole_numbers(33, 640, seed=3)
    gate = x.float() @ layer.weight[:64].float().T
    assert gate.min() < -90 < 90 < gate.max()

    layer.check(x, layer(x))


def arranged(x, *, pdl):
    """Order columns as `kernels.linear.gpu.arrange` does; 32 have dimensions thread, pair, byte of it and half."""
    del pdl
    return x.unflatten(1, (-1, 4, 2, 2, 2)).permute(0, 1, 5, 4, 2, 3).flatten(1)


@needs_triton
@pytest.mark.parametrize("rows", [5, 65, 256])
@pytest.mark.parametrize("form", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(
    ("kind", "outputs", "inputs"),
    [("plain", 192, 320), ("bias", 64, 64), ("gated", 128, 640), ("residual", 256, 1024)],
)
def test_weights_in_groups_are_multiplied_as_they_are_defined(
    kernel, monkeypatch, kind, outputs, inputs, form, rows
):
    monkeypatch.setattr(matrix, "arrange", arranged)
    weight = Weight.empty(form, (outputs, inputs), "cpu")
    generator = torch.Generator().manual_seed(1)
    if form.float:
        weight.numbers.copy_(whole_numbers(outputs, inputs, seed=1))
    else:
        weight.numbers.random_(0, 256, generator=generator)
    for scale in weight.scales.values():
        scale.copy_(torch.randint(1, 3, scale.shape, generator=generator) * SCALE)
    layer = Layer(kind, outputs, inputs)
    layer.weight = weight.dequantize()
    gated = kind == "gated"
    problem = LinearProblem(
        1, outputs // (1 + gated), inputs, gated=gated, format=form, bias=kind == "bias",
        residual=kind == "residual", layer_weights=1,
    )  # fmt: skip
    layer.linear = matrix.MatrixLinear(LinearWeights(weight, layer.bias), problem)
    x = whole_numbers(rows, inputs, seed=3)

    found = layer(x, pdl=True)

    ((_, _, splits),) = kernel.grids
    layer.check(x, found, splits)


@needs_triton
@pytest.mark.parametrize(
    "form", [GROUPS["fp8 in blocks of 128"], GROUPS["fp8 in groups of 128"]], ids=str
)
@pytest.mark.parametrize("rows", [16, 130])
def test_any_numbers_in_fp8_in_groups_are_as_exact_as_float32(kernel, form, rows):
    """Numbers and scales are exact, also scales of other magnitudes beside each other, one of them 0."""
    weight = Weight.empty(form, (192, 1024), "cpu")
    generator = torch.Generator().manual_seed(1)
    weight.numbers.copy_((torch.randn(weight.shape, generator=generator) * 100).clamp(-448, 448))
    weight.scale.copy_(torch.rand(weight.scale.shape, generator=generator) * 2e-3)
    weight.scale[:, ::2] *= 2.0**-8
    weight.scale[0, 3] = 0
    problem = LinearProblem(1, 192, 1024, "float16", format=form, residual=True, layer_weights=1)
    x = torch.randn((rows, 1024), generator=generator).half()

    found = matrix.MatrixLinear(LinearWeights(weight), problem)(x, None, None, LinearArguments())

    expected = x.double() @ weight.dequantize().double().T
    assert float((found.double().sum(0) - expected).abs().max()) < 1e-5


@needs_triton
@pytest.mark.parametrize("rows", [5, 33, 100])
@pytest.mark.parametrize("kind", ["plain", "bias", "gated"])
def test_memory_after_the_last_row_is_left_alone(kernel, kind, rows):
    layer = Layer(kind, 128, 192)
    x = whole_numbers(rows, 192, seed=3)
    buffer = torch.full((rows + 64, 128 // (1 + (kind == "gated"))), 7.0, dtype=torch.bfloat16)

    found = layer(x, out=buffer[:rows])

    assert found.data_ptr() == buffer.data_ptr()
    layer.check(x, buffer[:rows])
    assert bool((buffer[rows:] == 7.0).all())


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [5, 100])
def test_a_row_does_not_depend_on_the_others(kernel, kind, rows):
    layer = Layer(kind, 128, 384)
    x = whole_numbers(rows, 384, seed=3)
    others = torch.full_like(x, torch.nan)
    others[3] = x[3]
    alone, among = layer(x), layer(others)

    assert torch.equal(alone[..., 3, :], among[..., 3, :])
    assert bool(among.isnan().sum() == alone.numel() // rows * (rows - 1))


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_invariant_layer_computes_any_number_of_rows(kernel, kind):
    layer = Layer(kind, 192, 768, invariant=True)
    x = whole_numbers(300, 768, seed=3)
    many = layer(x, pdl=True)

    launch = plan_invariant_matrix(192, 768, may_split=kind == "residual")[MANY_ROWS]
    assert kernel.grids == [(-(-300 // launch.rows), 192 // launch.outputs, launch.splits)]
    assert launch.splits == (4 if kind == "residual" else 1)
    layer.check(x, many, launch.splits)
    for rows in (5, 64, 256, 257):
        assert torch.equal(layer(x[:rows]), many[..., :rows, :])


@needs_triton
def test_another_layer_computes_at_most_256_rows(kernel):
    with pytest.raises(KeyError):
        Layer("plain", 64, 64)(whole_numbers(257, 64, seed=3))


@needs_triton
@pytest.mark.parametrize(("chunks", "stages"), [(1, 1), (3, 3), (5, 3)])
def test_copies_of_weights_fill_the_ring_before_the_wait(kernel, plan, chunks, stages):
    plan(MatrixLaunch(64, 16, 64, splits=2), stages)
    layer = Layer("residual", 128, 2 * chunks * 64)
    x = whole_numbers(20, 2 * chunks * 64, seed=3)

    layer(x)
    assert kernel.copies_ahead == 0
    layer(x, pdl=True)
    assert kernel.copies_ahead == math.prod(kernel.grids[-1]) * stages


@needs_triton
def test_a_ring_of_one_stage_and_more_chunks_would_wait_forever(kernel, plan):
    plan(MatrixLaunch(64, 16, 64), stages=1)
    layer = Layer("plain", 64, 128)

    with pytest.raises(AssertionError, match="deadlock"):
        layer(whole_numbers(5, 128, seed=3))


@pytest.mark.parametrize("may_split", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 4096), (28672, 4096), (4096, 14336), (192, 320)]
)
def test_a_planned_ring_holds_all_chunks_or_more_than_one(outputs, inputs, may_split):
    for rows in (*ROW_COUNTS, MANY_ROWS):
        for bits in (16, 8, 4):
            launch = plan_matrix(outputs, inputs, rows, may_split=may_split, bits=bits)
            chunks = inputs // launch.splits // launch.columns

            assert launch.stages(inputs) >= min(2, chunks)


@needs_triton
@pytest.mark.parametrize("kind", ["gated", "residual"])
def test_a_bias_with_a_gate_or_partial_sums_is_refused(kind):
    problem = LinearProblem(1, 64, 64, gated=kind == "gated", residual=kind == "residual")
    weight = whole_numbers(128 if kind == "gated" else 64, 64, seed=1)

    with pytest.raises(AssertionError):
        matrix.MatrixLinear(linear_weights(weight, weight[:, 0].contiguous()), problem)
