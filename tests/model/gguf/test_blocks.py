"""The numbers and scales of quantized tensors, compared bit by bit with what the `gguf` package computes."""

import gguf
import numpy as np
import pytest
import torch

from model.checkpoint.formats import gguf_blocks
from model.gguf.tensor_types import QUANTIZED, find_type, type_name
from tests.model.gguf.written import random_rows


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 24])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_matrix_has_the_values_of_the_gguf_package(monkeypatch, name, chunk_bytes):
    monkeypatch.setattr(gguf_blocks, "_CHUNK_BYTES", chunk_bytes)
    shape = (7, 768)
    raw, values = random_rows(name, shape, seed=3)

    weight = gguf_blocks.read_blocks(QUANTIZED[name].form, shape, torch.from_numpy(raw))

    assert torch.equal(weight.dequantize(), values)
    assert weight.format == QUANTIZED[name].form


@pytest.mark.parametrize("name", QUANTIZED)
def test_scales_may_have_any_sign_and_be_zero(name):
    kind = QUANTIZED[name]
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 256, (4, kind.num_bytes), np.uint8)
    raw[0] = 0
    number = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        values = torch.from_numpy(gguf.dequantize(raw, number).copy())

    weight = gguf_blocks.read_blocks(kind.form, (4, kind.block), torch.from_numpy(raw))

    assert torch.equal(weight.dequantize().nan_to_num(), values.nan_to_num())


def test_the_sizes_of_types_are_those_of_the_gguf_package():
    for number in range(64):
        if (kind := find_type(number)) is not None:
            found = gguf.GGMLQuantizationType(number)
            assert (kind.name, (kind.block, kind.num_bytes)) == (
                found.name,
                gguf.GGML_QUANT_SIZES[found],
            )
            assert kind.form is None or kind.form.num_bytes((1, kind.block)) >= kind.num_bytes
    for found in gguf.GGMLQuantizationType:
        assert type_name(found.value) == found.name
