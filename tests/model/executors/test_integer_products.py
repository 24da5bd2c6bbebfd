"""Networks that are computed layer by layer with weights in 8 bits, by the products of the C library."""

import dataclasses

import pytest
import torch

from kernels.cpu.library import load
from kernels.weight_format import INT4_GROUPS, INT8_GROUPS
from kernels.weights import quantize
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model, load_part
from model.device.quantizations import product_formats
from model.network.matrix_shapes import matrix_shapes
from model.network.spec import Attention, Dense, Layer, Network
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE
from tests.model.executors.paged import PagedDriver

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason=str(load()))
NAMES = [
    "gemma2", "gemma2 untied", "gemma3", "gpt2", "opt", "granite tied biases", "cohere", "stablelm", "phi", "olmo2",
    "falcon", "nemotron", "apertus", "gpt_neox", "minicpm", "helium", "starcoder2", "exaone4 hybrid tied head_dim",
]  # fmt: skip
IDS = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def rounded(model, bits=8):
    """Round the matrices of a model that is not packed."""
    form = INT8_GROUPS if bits == 8 else INT4_GROUPS
    with torch.no_grad():
        for layer in model.decoder_layers:
            for matrix in layer.matrices.values():
                matrix.numbers.copy_(quantize(matrix.numbers, form).dequantize())
        for table in {id(it.numbers): it.numbers for it in (model.embedding, model.head)}.values():
            table.copy_(quantize(table, INT8_GROUPS).dequantize())
    return model


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_rounded_weights(name, tmp_path):
    case = CASES[name]
    case.save(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    exact = rounded(load_model(tmp_path, config, torch.float32, "cpu", pack=False))
    served = load_part(tmp_path, config, torch.float32, "cpu", weight_format=INT8_GROUPS)
    whole = served.weight_bytes
    served.optimize(rounds_inputs=True)

    found, expected = (
        PagedDriver(it).step({"a": IDS, "b": IDS[:1]})["a"] for it in (served, exact)
    )

    assert not served.is_in_library
    assert served.weight_format == INT8_GROUPS
    assert served.weight_bytes == whole
    assert (found - expected).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize("name", ["gemma2", "cohere untied biases"])
def test_prompts_and_decode_rows_have_the_same_tokens_in_any_company(name, tmp_path):
    CASES[name].save(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    served = load_part(tmp_path, config, torch.float32, "cpu", weight_format=INT4_GROUPS)
    served.optimize(rounds_inputs=True)
    alone, driver = PagedDriver(served).step({"a": IDS})["a"], PagedDriver(served)

    driver.step({"b": IDS[::-1], "c": IDS[:3], "a": IDS[:30]})
    parts = [driver.step({"b": [1], "a": [it]})["a"] for it in IDS[30:]]

    assert (torch.cat(parts) - alone[30:]).abs().max() < 0.02 * alone.abs().max()


def test_embedding_and_head_that_are_tied_are_one_packed_matrix(tmp_path):
    CASES["gemma2"].save(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    served = load_part(tmp_path, config, torch.float32, "cpu", weight_format=INT8_GROUPS)
    table = served.embedding.dequantize()
    served.optimize(rounds_inputs=True)

    assert len(served.embed_tokens) == 0
    assert (served.embedding_rows(torch.tensor([3, 0])) - table[[3, 0]]).abs().max() < 1e-6


def test_matrices_that_the_library_cannot_multiply_by_have_full_numbers():
    layer = Layer(Attention(2, 1, 20, 1.0), Dense(72))
    network = Network(50, 64, (layer,), tied=True)
    q4 = dataclasses.replace(INT4_GROUPS, name="Q4")
    fp8 = dataclasses.replace(INT8_GROUPS, name="fp8", float=True)

    found = product_formats(network, INT8_GROUPS, {})
    kept = product_formats(network, INT8_GROUPS, {"layers.0.qkv": q4, "layers.0.gate_up": fp8})

    assert matrix_shapes(network)[0]["output"].inputs == 40
    assert matrix_shapes(network)[0]["down"].inputs == 72
    assert found == dict.fromkeys(["layers.0.qkv", "layers.0.gate_up", "embed_tokens"], INT8_GROUPS)
    assert kept == found | {"layers.0.qkv": q4}
    assert product_formats(network, INT4_GROUPS, {"layers.0.qkv": INT8_GROUPS}) == found | {
        "layers.0.qkv": INT4_GROUPS,
        "layers.0.gate_up": INT4_GROUPS,
    }
