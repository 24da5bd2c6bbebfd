"""Updates are the difference between a model and what PEFT merges of the same adapter."""

import copy

import pytest
import torch

from model.adapters.adapter import AdapterReader
from model.adapters.updates import UpdateReader
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model, load_part
from model.errors import AdapterError
from model.families.table import FAMILIES
from model.network.matrix_shapes import _STORED_IN, matrix_shapes
from tests.model.adapters.peft_adapters import ALL_LINEAR, HYBRIDS, adapted, all_linear
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.model.network.ranks import ThreadCommunicator, ThreadRanks

KINDS = {
    "llama": "llama",
    "qwen3": "llama",
    "gemma3": "llama",
    "granite": "llama",
    "cohere": "llama",
    "phi3": "phi3",
    "phi3 partial longrope tied": "phi3",
    "gpt2": "gpt2",
}


@pytest.mark.parametrize("case", KINDS)
def test_an_update_is_what_peft_adds(case, tmp_path):
    model = CASES[case].save(tmp_path / "base")
    merged = adapted(
        copy.deepcopy(model), tmp_path / "adapter", 4, all_linear(KINDS[case]), use_rslora=True
    ).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    base, other = (_loaded(tmp_path / name) for name in ("base", "merged"))

    reader = AdapterReader(base.config, 16)
    updates = UpdateReader(base.config).read(reader.read(tmp_path / "adapter"), torch.float32)

    assert len(updates) == 4 * len(base.decoder_layers)
    for (index, name), update in updates.items():
        matrices = [it.decoder_layers[index].matrices[name].dequantize() for it in (base, other)]
        sizes = list(matrix_shapes(base.config.network)[index][name].parts)
        products = [b.T @ a for a, b in zip(update.a, update.b.split(sizes, 1), strict=True)]
        torch.testing.assert_close(
            torch.cat(products), matrices[1] - matrices[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ["llama", "gemma3", "granite", "phi3", "gpt2"])
def test_the_update_of_a_rank_is_what_its_part_of_the_model_gets(case, rank, tmp_path):
    model = CASES[case].save(tmp_path / "base")
    merged = adapted(
        copy.deepcopy(model), tmp_path / "adapter", 4, all_linear(KINDS[case])
    ).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    ranks = ThreadCommunicator(ThreadRanks(2), rank)
    base, other = (_loaded(tmp_path / name, ranks) for name in ("base", "merged"))

    found = AdapterReader(base.config, 16).read(tmp_path / "adapter")
    updates = UpdateReader(base.config, ranks).read(found, torch.float32)

    assert len(updates) == 4 * len(base.decoder_layers)
    shapes = matrix_shapes(base.network)
    for (index, name), update in updates.items():
        matrices = [it.decoder_layers[index].matrices[name].dequantize() for it in (base, other)]
        sizes = list(shapes[index][name].parts)
        products = [b.T @ a for a, b in zip(update.a, update.b.split(sizes, 1), strict=True)]
        torch.testing.assert_close(
            torch.cat(products), matrices[1] - matrices[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("case", HYBRIDS)
def test_an_update_of_a_hybrid_is_what_peft_adds(case, tmp_path):
    model = CASES[case].save(tmp_path / "base")
    with_adapter = adapted(copy.deepcopy(model), tmp_path / "adapter", 4, ALL_LINEAR)
    with_adapter.merge_and_unload().save_pretrained(tmp_path / "merged")
    base, other = (_loaded(tmp_path / name) for name in ("base", "merged"))

    reader = AdapterReader(base.config, 16)
    updates = UpdateReader(base.config).read(reader.read(tmp_path / "adapter"), torch.float32)

    shapes = matrix_shapes(base.config.network)
    assert updates.keys() == {(i, name) for i, layer in enumerate(shapes) for name in layer}
    for (index, name), update in updates.items():
        matrices = [it.decoder_layers[index].matrices[name].dequantize() for it in (base, other)]
        sizes = list(shapes[index][name].parts)
        products = [b.T @ a for a, b in zip(update.a, update.b.split(sizes, 1), strict=True)]
        torch.testing.assert_close(
            torch.cat(products), matrices[1] - matrices[0], rtol=1e-4, atol=1e-5
        )


def test_a_matrix_has_a_part_for_each_module_that_an_adapter_may_name():
    for family in FAMILIES.values():
        modules = family.tensors.layer_modules
        for stacked, name in _STORED_IN.items():
            assert stacked not in modules or modules[stacked] == modules[name], family.architecture

    for case in CASES.values():
        shapes = matrix_shapes(ModelConfig.from_dict(case.content).network)
        assert all(len(it.parts) <= 3 for layer in shapes for it in layer.values())
    of_qwen, of_mamba = (
        {
            name: it
            for layer in matrix_shapes(ModelConfig.from_dict(CASES[case].content).network)
            for name, it in layer.items()
        }
        for case in ("qwen3.5", "falcon h1")
    )
    assert of_qwen["qkv"].modules == ("q", "k", "v")
    assert of_qwen["qkv"].parts == (2 * 4 * 16, 2 * 16, 2 * 16)
    assert of_qwen["input"].modules == ("mixed_in", "z")
    assert of_qwen["gates"].modules == ("beta", "alpha")
    assert of_mamba["input"].modules == ("z",)
    assert of_mamba["input"].parts == (2 * 96 + 2 * 16 + 8,)


def test_parts_without_an_adapter_are_not_changed(tmp_path):
    model = CASES["llama"].save(tmp_path / "base")
    adapted(model, tmp_path / "adapter", 4, ["v_proj"])
    config = ModelConfig.from_folder(tmp_path / "base")

    found = AdapterReader(config, 16).read(tmp_path / "adapter")
    updates = UpdateReader(config).read(found, torch.float32)

    assert {name for _, name in updates} == {"qkv"}
    assert not updates[0, "qkv"].a[:2].any()
    assert not updates[0, "qkv"].b[:, : 4 * 16 + 2 * 16].any()


def test_numbers_that_the_dtype_cannot_hold_are_refused(tmp_path):
    model = CASES["llama"].save(tmp_path / "base")
    adapted(model, tmp_path / "adapter", 4, ["v_proj"], std=1e3, lora_alpha=1e6)
    config = ModelConfig.from_folder(tmp_path / "base")
    found = AdapterReader(config, 16).read(tmp_path / "adapter")

    with pytest.raises(AdapterError, match="float16 cannot hold"):
        UpdateReader(config).read(found, torch.float16)


def _loaded(folder, ranks=None):
    config = ModelConfig.from_folder(folder)
    if ranks is not None:
        return load_part(folder, config, torch.float32, "cpu", communicator=ranks)
    return load_model(folder, config, torch.float32, "cpu", pack=False)
