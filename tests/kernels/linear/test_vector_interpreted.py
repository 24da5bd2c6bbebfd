"""Linear layers with norm, gate, bias and residual, in Triton's interpreter, against PyTorch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.errors import ShapeError
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import LIBRARY, VECTOR
from kernels.linear.select import LinearChoice, LinearLaunch, select_linear
from kernels.linear.weights import Norm
from tests.kernels import triton_interpreter
from tests.kernels.linear.layer import linear
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than
from tests.kernels.tuning_check import linear_launch_mistakes

pytestmark = triton_interpreter.interpreted

LAUNCH = LinearLaunch(4, 256, 1, ahead=2)
KERNELS = [pytest.param(spec, id=spec.name) for spec in (VECTOR, LIBRARY)]
DTYPES = ["float16", "bfloat16"]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _poison():
    torch.manual_seed(0)
    with triton_interpreter.poisoned_memory():
        yield


def choose(kernel, rows, outputs, inputs, dtype="float16", *, gated=False, **launch):
    """Make a choice with a valid launch."""
    problem = LinearProblem(rows, outputs, inputs, dtype, gated)
    config = dataclasses.replace(LAUNCH, **launch) if kernel is VECTOR else None
    choice = LinearChoice(problem, kernel, config, "for the test")
    assert linear_launch_mistakes(choice) == []
    return choice


def tensors(choice, *, seed=0):
    """Make the input, with NaN between its rows, and the weights."""
    problem = choice.problem
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    around = torch.full((problem.rows, problem.inputs + 8), float("nan"), dtype=dtype)
    x = around[:, : problem.inputs]
    x.copy_(torch.randn(x.shape, generator=generator))
    shape = (problem.matrices * problem.outputs, problem.inputs)
    weight = torch.randn(shape, generator=generator) * problem.inputs**-0.5
    return x, weight.to(dtype)


def run(choice, x, weight, **arguments):
    out = torch.full((len(x), choice.problem.outputs), float("nan"), dtype=x.dtype)
    linear(x, weight, choice, out, **arguments)
    return out


def expected(x, weight, dtype, *, gated=False, bias=None, norm=None, residual=None):
    """Compute the layer by the formulas, in `dtype` throughout."""
    if norm is not None:
        x = reference.rms_norm(x, *norm, dtype)
    result = x.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        result = result + bias.to(dtype)
    if gated:
        result = reference.silu_and_mul(result, dtype)
    return result if residual is None else result + residual.to(dtype)


def check(choice, x, weight, **arguments):
    out = run(choice, x, weight, **arguments)
    rules = {**arguments, "gated": choice.problem.gated}
    truth = expected(x, weight, torch.float32, **rules)
    # PyTorch's operations have another order than the formula and more than twice its error.
    factor = 3.0 if choice.spec is LIBRARY else 2.0
    assert_no_worse_than(out, truth, expected(x, weight, x.dtype, **rules), factor=factor)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_linear_layer_of_a_few_rows_agrees_with_pytorch(kernel, dtype, rows):
    choice = choose(kernel, rows, 48, 576, dtype)

    check(choice, *tensors(choice))


@pytest.mark.parametrize("outputs", [1, 15, 33])
@pytest.mark.parametrize("rows", [1, 4])
def test_outputs_that_are_not_a_multiple_of_the_tile_agree_with_pytorch(outputs, rows):
    choice = choose(VECTOR, rows, outputs, 320)

    check(choice, *tensors(choice))


@pytest.mark.parametrize(
    ("inputs", "block_k", "warps", "ahead"),
    [(256, 256, 1, 1), (264, 256, 1, 2), (384, 512, 2, 4), (1000, 256, 1, 3), (2048, 1024, 4, 1)],
)
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_inputs_that_are_not_a_multiple_of_the_chunk_agree_with_pytorch(
    inputs, block_k, warps, ahead, gated
):
    launch = {"block_k": block_k, "num_warps": warps, "ahead": ahead}
    choice = choose(VECTOR, 2, 12, inputs, gated=gated, **launch)

    check(choice, *tensors(choice))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("around", ["bias", "norm", "both"])
@pytest.mark.parametrize("rows", [1, 3])
def test_bias_and_norm_agree_with_pytorch(kernel, gated, around, rows):
    choice = choose(kernel, rows, 40, 320, gated=gated)
    x, weight = tensors(choice)
    bias = torch.randn(len(weight)).half() if around != "norm" else None
    norm = Norm(torch.rand(320).half() + 0.5, EPS) if around != "bias" else None

    check(choice, x * 30, weight, bias=bias, norm=norm)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_residual_is_added_in_place(kernel, rows):
    choice = choose(kernel, rows, 40, 320)
    x, weight = tensors(choice)
    residual = torch.randn(rows, 40).half()
    truth = expected(x, weight, torch.float32, residual=residual)
    plain = expected(x, weight, torch.float16, residual=residual)

    linear(x, weight, choice, residual, residual=residual)

    assert_no_worse_than(residual, truth, plain)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_residual_and_a_bias_are_both_added(kernel, rows):
    choice = choose(kernel, rows, 40, 320)
    x, weight = tensors(choice)

    check(choice, x, weight, bias=torch.randn(40).half(), residual=torch.randn(rows, 40).half())


def test_rows_do_not_change_each_other():
    choice = choose(VECTOR, 4, 40, 320)
    x, weight = tensors(choice)
    out = run(choice, x, weight)

    changed = run(choice, torch.cat((x[:1], x[1:] * 100)), weight)

    assert torch.equal(changed[0], out[0])


def test_float32_agrees_with_pytorch_to_its_last_digits():
    problem = LinearProblem(2, 24, 320, "float32")
    choice = LinearChoice(problem, VECTOR, LAUNCH, "for the test")
    x, weight = tensors(choice)

    torch.testing.assert_close(run(choice, x, weight), x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sm", ["a100", "h100"])
def test_the_selected_kernel_computes_the_layer(kernel, sm):
    rows = {VECTOR.name: 2, LIBRARY.name: 5}[kernel.name]
    choice = select_linear(LinearProblem(rows, 72, 384, "float16"), CATALOGUE[sm])

    assert choice.spec is kernel
    check(choice, *tensors(choice))


@pytest.mark.parametrize(
    "change",
    [{"rows": 3}, {"outputs": 41}, {"inputs": 328}, {"gated": True}],
    ids=lambda change: next(iter(change)),
)
def test_tensors_that_do_not_fit_the_choice_are_rejected(change):
    choice = choose(VECTOR, 2, 40, 320)
    x, weight = tensors(choice)
    other = dataclasses.replace(choice, problem=dataclasses.replace(choice.problem, **change))

    with pytest.raises(ShapeError, match=r"the choice is vector for|the layer is"):
        linear(x, weight, other, torch.empty(2, 40, dtype=x.dtype))
