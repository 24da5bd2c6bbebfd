"""Linear layers of the C library: its product with the operations around it, for any number of rows."""

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE, CPU
from kernels.cpu.library import load
from kernels.linear.cpu.integers import unsupported
from kernels.linear.problem import LinearProblem
from kernels.linear.projection import (
    SWIGLU,
    Activation,
    FusedProjection,
    LayerNorm,
    LinearWeights,
    Norm,
    Operations,
    Residual,
    bind_projection,
)
from kernels.linear.registry import INTEGERS
from kernels.linear.select import select_linear
from kernels.weight_format import FP8_ROWS, INT4_GROUPS, INT8_GROUPS, INT8_ROWS, WeightFormat
from kernels.weights import quantize
from tests.kernels.cpu.reference import rounded_activations
from tests.kernels.references.problems import assert_no_worse_than

LIBRARY = load()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))
PROBLEM = LinearProblem(1, 64, 96, "float32", format=INT8_GROUPS, rounds_inputs=True)
FORMATS = pytest.mark.parametrize("form", [INT8_GROUPS, INT4_GROUPS], ids=lambda it: it.name)
ACTIVATIONS = {
    "none": None,
    "silu gated": SWIGLU,
    "gelu_tanh gated": Activation("gelu_tanh", gated=True),
    "gelu_tanh": Activation("gelu_tanh", gated=False),
    "relu": Activation("relu", gated=False),
    "gelu gated": Activation("gelu", gated=True),
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(outputs, inputs, form=INT8_GROUPS, *, bias=True):
    weight = quantize(random(outputs, inputs) * inputs**-0.5, form)
    return LinearWeights(weight, random(outputs, seed=1) if bias else None)


def bind(weights, operations=Operations()):  # noqa: B008 - immutable
    bound = bind_projection(weights, torch.float32, CPU, operations, rounds_inputs=True)
    assert isinstance(bound, FusedProjection)
    return bound


def norm_of(kind, size):
    weight, bias = random(size, seed=2) * 0.1 + 1, random(size, seed=3)
    return {"none": None, "rms": Norm(weight, 1e-6), "layer": LayerNorm(weight, bias, 1e-5)}[kind]


def normalized(norm, x):
    """Return rows in float64 after a norm; the library rounds them to float32 before it quantizes them."""
    x = x.double()
    if isinstance(norm, LayerNorm):
        size = norm.weight.shape
        return torch.layer_norm(x, size, norm.weight.double(), norm.bias.double(), norm.eps)
    if norm is not None:
        return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    return x


def activated(activation, y):
    if activation is None:
        return y
    function = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda it: torch.nn.functional.gelu(it, approximate="tanh"),
        "relu": torch.relu,
    }[activation.function]
    if not activation.gated:
        return function(y)
    gate, up = y.chunk(2, -1)
    return function(gate) * up


@FORMATS
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (160, 224), (1002, 64)], ids=str)
def test_what_reads_the_residual_stream_has_its_norm_and_activation(
    form, norm, activation, outputs, inputs
):
    weights, x = layer(outputs, inputs, form), random(13, inputs, seed=4)
    norm, activation = norm_of(norm, inputs), ACTIVATIONS[activation]
    bound = bind(weights, Operations(norm, activation))

    found, same = bound.from_residual(Residual(x))

    matrix, bias = weights.weight.dequantize().double(), weights.bias.double()
    truth = activated(activation, normalized(norm, x) @ matrix.T + bias)
    rounded = rounded_activations(normalized(norm, x).float()) @ matrix.T + bias
    assert same.hidden is x
    assert_no_worse_than(found, truth, activated(activation, rounded).float(), atol=1e-5)


@FORMATS
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("outputs", [64, 72, 200])
def test_what_adds_to_the_residual_stream_adds_the_norm_of_its_result(form, has_norm, outputs):
    weights, x, stream = layer(outputs, 96, form), random(5, 96), random(5, outputs, seed=4)
    norm = norm_of("rms", outputs) if has_norm else None
    before = stream.double()

    found = bind(weights, Operations(residual=True, post_norm=norm)).to_residual(
        x, Residual(stream.clone())
    )

    matrix, bias = weights.weight.dequantize().double(), weights.bias.double()
    truth = before + normalized(norm, x.double() @ matrix.T + bias)
    rounded = before + normalized(norm, rounded_activations(x) @ matrix.T + bias)
    assert_no_worse_than(found.hidden, truth, rounded.float(), atol=1e-5)


@pytest.mark.parametrize("operations", [
    Operations(norm_of("rms", 96), SWIGLU), Operations(norm_of("layer", 96)), Operations(residual=True),
    Operations(residual=True, post_norm=norm_of("rms", 128)),
])  # fmt: skip
def test_a_row_has_the_same_bits_beside_any_others(operations):
    bound, x, stream = bind(layer(128, 96), operations), random(150, 96), random(150, 128, seed=1)

    def compute(rows):
        if operations.residual:
            return bound.to_residual(x[rows], Residual(stream[rows].clone())).hidden
        return bound.from_residual(Residual(x[rows]))[0]

    together = compute(slice(150))
    for first, stop in ((0, 1), (0, 3), (2, 9), (77, 78), (100, 150)):
        assert torch.equal(compute(slice(first, stop)), together[first:stop])


@pytest.mark.parametrize("shape", [(3, 96), (2, 3, 96), (0, 96), (1, 96)], ids=str)
@pytest.mark.parametrize("activation", [None, SWIGLU])
def test_the_product_alone_has_gate_above_up(shape, activation):
    weights, x = layer(128, 96), random(*shape)

    found = bind(weights, Operations(norm_of("rms", 96), activation))(x)

    assert found.shape == (*shape[:-1], 128)
    assert torch.equal(found, bind(weights)(x))


def test_adapters_add_to_the_product_before_its_activation():
    weights, x, norm = layer(128, 96), random(4, 96), norm_of("rms", 96)
    bound = bind(weights, Operations(norm, SWIGLU))

    found, _ = bound.adapted(lambda x: lambda y: y + x.sum(-1, keepdim=True)).from_residual(
        Residual(x)
    )

    read = torch.nn.functional.rms_norm(x, (96,), *norm)
    expected = activated(SWIGLU, bind(weights)(read) + read.sum(-1, keepdim=True))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_rows_of_a_matrix_are_its_numbers():
    weights, index = layer(100, 96), torch.tensor([99, 0, 5, 5])

    found = bind(weights).product.rows(index)

    assert (found - weights.weight.dequantize()[index]).abs().max() < 1e-6


def test_strided_inputs_are_read_as_they_are():
    weights, wide = layer(64, 96), random(6, 200)

    assert torch.equal(bind(weights)(wide[:, 50:146]), bind(weights)(wide[:, 50:146].clone()))


def test_inputs_that_have_an_order_are_put_in_it_after_the_norm():
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0)).int()
    plain = layer(64, 96)
    ordered = plain._replace(weight=plain.weight.with_columns_sorted(order))
    x, norm = random(3, 96), norm_of("rms", 96)

    found, _ = bind_projection(
        ordered, torch.float32, CPU, Operations(norm), rounds_inputs=True
    ).from_residual(Residual(x))

    expected = normalized(norm, x) @ ordered.weight.dequantize().double().T + ordered.bias
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("changes", "arch", "reason"),
    [
        ({}, CATALOGUE["h100"], "needs a CPU"),
        ({"trainable": True}, CPU, "not differentiable"),
        ({"rounds_inputs": False}, CPU, "inputs are not to be rounded: set --dtype auto"),
        ({"dtype": "bfloat16"}, CPU, "no bfloat16"),
        ({"dtype": "float32", "format": FP8_ROWS}, CPU, "no weights in float8_e4m3fn: set --quant"),
        ({"inputs": 112}, CPU, "112 inputs are not a multiple of 32"),
        ({"format": PROBLEM.format, "inputs": 40}, CPU, "40 inputs are not a multiple of 32"),
        ({"format": WeightFormat("full", 32)}, CPU, "weights are not quantized"),
    ],
    ids=str,
)  # fmt: skip
def test_other_problems_are_refused_with_the_reason(changes, arch, reason):
    found = INTEGERS.unsupported(dataclasses.replace(PROBLEM, **changes), arch)

    assert reason in "; ".join(found)


@pytest.mark.parametrize("form", [INT8_GROUPS, INT4_GROUPS, INT8_ROWS], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_integers_on_a_cpu_are_multiplied_by_the_library(form, batch_invariant, in_place):
    problem = dataclasses.replace(
        PROBLEM, format=form, batch_invariant=batch_invariant, in_place=in_place
    )

    assert select_linear(problem, CPU).spec is INTEGERS


def test_a_library_that_cannot_be_loaded_is_the_reason(monkeypatch):
    monkeypatch.setattr("kernels.linear.cpu.integers.load", lambda: "there is none")

    assert unsupported(PROBLEM) == ("there is none",)
    assert select_linear(PROBLEM, CPU).spec.name == "pytorch"
