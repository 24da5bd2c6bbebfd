"""Linear layers with FP8 weights, in Triton's interpreter, against the formula on the dequantized weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.errors import ShapeError
from kernels.fp8 import quantize_rows
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import LIBRARY, LIBRARY_FP8, VECTOR
from kernels.linear.select import LinearChoice, LinearLaunch, select_linear
from kernels.linear.weights import Norm
from kernels.norms.gpu import quantize_rows as fused
from kernels.weight_format import FP8_ROWS
from tests.kernels import float8_library, triton_interpreter
from tests.kernels.linear.layer import linear
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than
from tests.kernels.references.reference_fp8 import dequantize_rows
from tests.kernels.tuning_check import linear_launch_mistakes

pytestmark = triton_interpreter.interpreted

LAUNCH = LinearLaunch(4, 256, 1, ahead=2)
KERNELS = [pytest.param(spec, id=spec.name) for spec in (VECTOR, LIBRARY_FP8, LIBRARY)]
DTYPES = ["float16", "bfloat16"]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    torch.manual_seed(0)
    float8_library.provide(monkeypatch)
    with triton_interpreter.poisoned_memory():
        yield


def choose(kernel, rows, outputs, inputs, dtype="float16", *, gated=False, unpacks=False, **launch):
    problem = LinearProblem(rows, outputs, inputs, dtype, gated, FP8_ROWS)
    config = dataclasses.replace(LAUNCH, **launch) if kernel is VECTOR else None
    choice = LinearChoice(problem, kernel, config, "for the test", unpacks=unpacks)
    assert linear_launch_mistakes(choice) == []
    return choice


def tensors(choice):
    """Make the input, with NaN between its rows, and weights with their scales, which differ widely."""
    problem = choice.problem
    dtype = getattr(torch, problem.dtype)
    around = torch.full((problem.rows, problem.inputs + 8), float("nan"), dtype=dtype)
    x = around[:, : problem.inputs]
    x.copy_(torch.randn(x.shape))
    weight = torch.randn(problem.matrices * problem.outputs, problem.inputs)
    weight *= problem.inputs**-0.5 * torch.rand(len(weight), 1) * 2
    return x, *quantize_rows(weight)


def expected(choice, x, weight, scale, dtype, *, bias=None, norm=None, residual=None):
    """Compute the layer by the formulas in `dtype`; rows are rounded to FP8 where the kernel rounds them."""
    if norm is not None:
        x = reference.rms_norm(x, *norm, torch.float32)
    if choice.spec is LIBRARY_FP8:
        x = reference.dequantize(*reference.quantize(x))
    result = x.to(dtype) @ reference.dequantize(weight, scale).to(dtype).T
    if bias is not None:
        result = result + bias.to(dtype)
    if choice.problem.gated:
        result = reference.silu_and_mul(result, dtype)
    return result if residual is None else result + residual.to(dtype)


def run(choice, x, weight, scale, **arguments):
    out = torch.full((len(x), choice.problem.outputs), float("nan"), dtype=x.dtype)
    linear(x, weight, choice, out, scale=scale, **arguments)
    return out


def check(choice, *operands, **arguments):
    out = run(choice, *operands, **arguments)
    truth, plain = (
        expected(choice, *operands, dtype, **arguments)
        for dtype in (torch.float32, operands[0].dtype)
    )
    # After a norm, a number halfway between two FP8 numbers may be rounded to either of them.
    factor = 2.0 if choice.spec is VECTOR else 3.0
    assert_no_worse_than(out, truth, plain, factor=factor)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_layer_agrees_with_the_formula(kernel, dtype, rows):
    choice = choose(kernel, rows, 48, 576, dtype)

    check(choice, *tensors(choice))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("around", ["bias", "norm", "both"])
def test_bias_and_norm_agree_with_the_formula(kernel, gated, around):
    choice = choose(kernel, 3, 48, 320, gated=gated)
    x, weight, scale = tensors(choice)
    bias = torch.randn(len(weight)).half() if around != "norm" else None
    norm = Norm(torch.rand(320).half() + 0.5, EPS) if around != "bias" else None

    check(choice, x * 30, weight, scale, bias=bias, norm=norm)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_a_residual_is_added_in_place(kernel, biased):
    choice = choose(kernel, 4, 48, 320)
    operands = tensors(choice)
    residual = torch.randn(4, 48).half()
    around = {"residual": residual, "bias": torch.randn(48).half() if biased else None}
    truth, plain = (
        expected(choice, *operands, dtype, **around) for dtype in (torch.float32, torch.float16)
    )

    x, weight, scale = operands
    linear(x, weight, choice, residual, scale=scale, **around)

    assert_no_worse_than(residual, truth, plain)


@pytest.mark.parametrize("outputs", [1, 15, 33])
@pytest.mark.parametrize(("inputs", "block_k"), [(264, 256), (1000, 512)])
@pytest.mark.parametrize("unpacks", [False, True], ids=["", "by hand"])
def test_sizes_that_are_not_multiples_of_tiles_agree_with_the_formula(
    outputs, inputs, block_k, unpacks
):
    choice = choose(VECTOR, 2, outputs, inputs, unpacks=unpacks, block_k=block_k)

    check(choice, *tensors(choice))


def test_bit_operations_convert_every_float8_number_exactly():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = torch.where(numbers.float().isnan(), 0.0, numbers.float()).to(torch.float8_e4m3fn)
    weight = weight.repeat(256, 1)
    x = torch.eye(256)[torch.arange(4) * 64 + 7]
    scale = torch.ones(256)

    for first in range(0, 256, 4):
        x = torch.eye(256)[first : first + 4]
        choice = choose(VECTOR, 4, 256, 256, "float32", unpacks=True, block_n=256)
        found = run(choice, x, weight, scale)
        assert torch.equal(found[:, 0], weight[0, first : first + 4].float())


def test_few_rows_are_not_quantized_and_do_not_change_each_other():
    choice = choose(VECTOR, 4, 48, 320)
    x, weight, scale = tensors(choice)
    x[1:, 0] = 1000.0
    out = run(choice, x, weight, scale)

    changed = run(choice, torch.cat((x[:1], x[1:] * 30)), weight, scale)

    assert torch.equal(changed[0], out[0])


def test_a_quantized_row_does_not_depend_on_the_other_rows():
    choice = choose(LIBRARY_FP8, 8, 48, 320)
    x, weight, scale = tensors(choice)
    out = run(choice, x, weight, scale)

    changed = run(choice, torch.cat((x[:1], x[1:] * 30)), weight, scale)

    assert torch.equal(changed[0], out[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 96, 1000])
def test_rows_are_quantized_as_pytorch_does(dtype, size):
    rows = torch.randn(5, size).to(dtype) * torch.tensor([1e-3, 1.0, 40.0, 0.0, 1e4])[:, None].to(
        dtype
    )

    numbers, scales = fused.quantize_rows(rows)

    wanted, wanted_scales = quantize_rows(rows)
    torch.testing.assert_close(scales[:, 0], wanted_scales)
    assert (numbers.view(torch.uint8) == wanted.view(torch.uint8)).float().mean() > 0.99
    found = dequantize_rows(numbers, scales[:, 0], torch.float32)
    assert bool(((found - rows.float()).abs() <= rows.float().abs() / 15 + scales * 2**-9).all())


def test_a_row_with_nan_or_infinity_has_no_finite_output():
    choice = choose(LIBRARY_FP8, 2, 48, 320)
    x, weight, scale = tensors(choice)
    for bad in (float("nan"), float("inf")):
        x[1, 3] = bad
        out = run(choice, x, weight, scale)

        assert bool(out[0].isfinite().all())
        assert not bool(out[1].isfinite().any())


@pytest.mark.parametrize(
    ("rows", "sm", "kernel"),
    [
        (2, "a100", "vector"),
        (5, "a100", "library"),
        (2, "h100", "vector"),
        (5, "h100", "library_fp8"),
    ],
)
def test_the_selected_kernel_computes_the_layer(rows, sm, kernel):
    choice = select_linear(LinearProblem(rows, 80, 384, "float16", format=FP8_ROWS), CATALOGUE[sm])

    assert choice.spec.name == kernel
    check(choice, *tensors(choice))


def test_scales_of_a_wrong_shape_are_rejected():
    choice = choose(VECTOR, 2, 48, 320)
    x, weight, scale = tensors(choice)
    out = torch.empty(2, 48, dtype=x.dtype)

    for wrong in (None, scale[:-1]):
        with pytest.raises(ShapeError, match="its scale is"):
            linear(x, weight, choice, out, scale=wrong)
    with pytest.raises(ShapeError, match=r"weight is .* torch\.float16"):
        linear(x, weight.half(), choice, out, scale=scale)
