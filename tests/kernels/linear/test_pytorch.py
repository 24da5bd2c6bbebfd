"""Products in PyTorch of weights that are converted some outputs at a time, and which rows read weights in place."""

import pytest
import torch
from torch.nn import functional

from kernels.arch import CATALOGUE, detect
from kernels.linear import pytorch
from kernels.linear.problem import LinearProblem
from kernels.linear.projection import bind_projection
from kernels.linear.registry import REGISTRY
from kernels.linear.select import select_linear
from kernels.linear.weights import LinearWeights
from kernels.weight_format import FP8_ROWS, INT4_GROUPS, WeightFormat, unquantized
from kernels.weights import Weight, quantize

CPU = detect(torch.device("cpu"))
FORMATS = {
    "rows": FP8_ROWS,
    "groups of 4 bits": INT4_GROUPS,
    "blocks": WeightFormat("blocks", 8, group=24, scales="block"),
    "bfloat16": unquantized("bfloat16"),
    "float16": unquantized("float16"),
}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_matrix_that_is_converted_in_pieces_gives_the_product_of_the_whole(
    monkeypatch, form, has_bias
):
    monkeypatch.setattr(pytorch, "_CPU_PIECE", 1)
    monkeypatch.setattr(pytorch, "_FEWEST_ROWS", 7)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100, 96, generator=generator)
    weight = (
        quantize(values, form)
        if form.is_quantized
        else Weight.full(values.to(getattr(torch, form.name)))
    )
    bias = torch.randn(100, generator=generator) if has_bias else None
    x = torch.randn(2, 5, 96, generator=generator)

    bound = bind_projection(LinearWeights(weight, bias), x.dtype, CPU, in_place=True)
    found = bound(x)

    assert not bound.copies_weights
    expected = functional.linear(
        x.double(), weight.dequantize().double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", [CPU, *CATALOGUE.values()], ids=lambda it: it.key)
def test_full_numbers_that_are_read_in_place_are_converted_by_one_row_alone(arch):
    problem = LinearProblem(1, 64, 64, dtype="float32", in_place=True)

    choice = select_linear(problem, arch)

    assert choice.spec.name == "pytorch"
    reading = {row.name for row in REGISTRY if not row.unsupported(problem, arch)}
    assert reading == {"pytorch"}
