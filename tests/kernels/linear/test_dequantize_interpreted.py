"""The values of quantized matrices, and the order of columns for 4-bit weights, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.weight_format import FP8_ROWS, INT8_ROWS, WeightFormat
from tests.kernels import triton_interpreter
from tests.kernels.test_weights import random_weight

pytestmark = triton_interpreter.interpreted

FORMATS = (
    FP8_ROWS,
    INT8_ROWS,
    WeightFormat("int4", 4, 32, "group", True, False, 8, "float16"),
    WeightFormat("int4", 4, 128, "group", False, False, 0, "bfloat16"),
    WeightFormat("int4 rows", 4, scales="row", float=False, offset=8),
    WeightFormat("fp8 blocks", 8, 128, "block"),
    WeightFormat("int8 groups", 8, 64, "group", True, False),
)


@pytest.mark.parametrize("form", FORMATS, ids=lambda it: f"{it.name} {it.group}")
@pytest.mark.parametrize("shape", [(7, 96), (130, 1100)], ids=str)
def test_a_matrix_has_the_values_of_the_definition(form, shape):
    from kernels.linear.gpu.dequantize import dequantize

    weight = random_weight(form, shape)

    found = dequantize(weight, torch.float32, unpacks=form.float)

    torch.testing.assert_close(found, weight.dequantize(), rtol=1e-6, atol=1e-6)


def test_columns_are_ordered_by_half_byte_pair_and_thread():
    from kernels.linear.gpu.arrange import arrange
    from tests.kernels.linear.test_matrix import arranged

    x = torch.arange(2 * 1056, dtype=torch.float32).view(2, 1056)

    assert torch.equal(arrange(x, pdl=False), arranged(x, pdl=False))
