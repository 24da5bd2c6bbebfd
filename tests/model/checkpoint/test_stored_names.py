"""Names of tensors in files, with the names of whatever modules contained the model when it was saved."""

import json

import pytest
import safetensors.torch
import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.parameter_parts import named_parts
from model.checkpoint.stored_names import Buffer, StoredNames
from model.checkpoint.weights import load_model
from model.decoder import DecoderLM
from model.errors import WeightsError
from model.families.table import FAMILIES
from tests.model.checkpoint.hf_checkpoints import CASES

SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    CASES["llama"].save(folder)
    return folder, safetensors.torch.load_file(folder / SINGLE)


def load_renamed(saved, tmp_path, rename):
    folder, tensors = saved
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    renamed = {new: it for name, it in tensors.items() if (new := rename(name)) is not None}
    safetensors.torch.save_file(renamed, tmp_path / SINGLE)
    return load_model(tmp_path, ModelConfig.from_folder(tmp_path), torch.float32, "cpu", pack=False)


def prefixed(prefix, inner="model."):
    """Rename as a module does that contains the language model; the head stays outside."""
    return lambda name: prefix + name.removeprefix(inner) if name.startswith(inner) else name


RENAMINGS = {
    "no prefix": prefixed(""),
    "of a multimodal model": prefixed("language_model.model."),
    "of a multimodal model in transformers 5": prefixed("model.language_model."),
    "three modules": prefixed("model.language_model.model."),
    "the language model alone": prefixed("language_model."),
    "twice": prefixed("model.model."),
    "GPT-2's": prefixed("transformer."),
    "another name": prefixed("text_model."),
    "DataParallel": "module.{}".format,
    "compiled": "_orig_mod.{}".format,
    "compiled and DataParallel": "_orig_mod.module.{}".format,
    "DataParallel and compiled": "module._orig_mod.{}".format,
    "FSDP": "_fsdp_wrapped_module.{}".format,
    "compiled layers": lambda it: it.replace(".self_attn.", "._orig_mod.self_attn."),
    "FSDP's layers": lambda it: it.replace("layers.1.", "layers.1._fsdp_wrapped_module."),
    "checkpointed layers": lambda it: it.replace(
        "layers.0.", "layers.0._checkpoint_wrapped_module."
    ),
    "an adapter that is merged": "base_model.model.{}".format,
    "the head inside": lambda it: "language_model." + it,
    "the head deep inside": lambda it: "model.language_model." + it,
}


@pytest.mark.parametrize("name", RENAMINGS)
def test_names_of_modules_that_contain_the_model_do_not_matter(saved, tmp_path, name):
    model = load_renamed(saved, tmp_path, RENAMINGS[name])

    tensors = saved[1]
    assert torch.equal(model.embed_tokens, tensors["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head, tensors["lm_head.weight"])
    assert torch.equal(model.layers[1].down.numbers, tensors["model.layers.1.mlp.down_proj.weight"])


def test_a_tensor_under_two_names_is_an_error_that_has_both(saved, tmp_path):
    folder, tensors = saved
    twice = {**tensors, "language_model.model.norm.weight": tensors["model.norm.weight"].clone()}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    safetensors.torch.save_file(twice, tmp_path / SINGLE)

    with pytest.raises(WeightsError, match=r"twice, as .*model\.norm\.weight and .*norm\.weight"):
        load_model(tmp_path, ModelConfig.from_folder(tmp_path), torch.float32, "cpu")


PEFT = {
    "LoRA": "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    "LoRA by name": "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight",
    "base": "model.layers.0.self_attn.q_proj.base_layer.weight",
    "embedding": "base_model.model.model.embed_tokens.lora_embedding_A.default",
    "saved": "base_model.model.lm_head.modules_to_save.default.weight",
    "DoRA": "model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight",
    "IA3": "model.layers.0.self_attn.k_proj.ia3_l.default",
}


@pytest.mark.parametrize("name", PEFT.values(), ids=PEFT)
def test_an_adapter_that_is_not_merged_is_named_with_what_to_do(saved, tmp_path, name):
    folder, tensors = saved
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    safetensors.torch.save_file({**tensors, name: torch.zeros(2, 2)}, tmp_path / SINGLE)

    with pytest.raises(WeightsError, match=r"adapter of PEFT that is not merged.*merge_and_unload"):
        load_model(tmp_path, ModelConfig.from_folder(tmp_path), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("renames", "hint"),
    [
        (
            {"self_attn.q_proj": "attention.wq", "model.embed_tokens": "tok_embeddings"},
            "Meta and Mistral",
        ),
        ({"model.layers.": "blk."}, "GGUF"),
        ({"model.layers.": "bert.encoder.layer."}, "an encoder"),
        ({"mlp.up_proj": "mlp.experts.0.up_proj"}, "mixture of experts"),
    ],
)
def test_names_of_another_format_are_recognized(saved, tmp_path, renames, hint):
    def rename(name):
        for old, new in renames.items():
            name = name.replace(old, new)
        return name

    with pytest.raises(
        WeightsError, match=f"do not fit its config.json: .*missing.*; names such as .*{hint}"
    ):
        load_renamed(saved, tmp_path, rename)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_family_s_own_names_are_mapped_to_themselves(case):
    config = ModelConfig.from_dict(case.config().to_dict() | {"architectures": [case.architecture]})
    needed = named_parts(DecoderLM(config, device="meta"))
    names = StoredNames(FAMILIES[config.architecture].tensors, needed, len(config.network.layers))

    assert {names.full(name) for name in needed} == set(needed)
    assert not any(names.buffer(name, (2, 2)) for name in needed)
    assert not any(names.is_beyond_layers(name) or names.is_ignored(name) for name in needed)


def test_the_head_of_gpt_neox_has_two_names():
    config = ModelConfig.from_dict(json.loads(json.dumps(CASES["gpt_neox"].config().to_dict())))
    names = StoredNames(
        FAMILIES[config.architecture].tensors, named_parts(DecoderLM(config, device="meta")), 2
    )

    assert names.full("lm_head.weight") == names.full("embed_out.weight") == "embed_out.weight"


def test_a_bias_of_attention_is_a_mask_only_if_it_has_rows():
    config = ModelConfig.from_dict(json.loads(json.dumps(CASES["gpt2"].config().to_dict())))
    needed = named_parts(DecoderLM(config, device="meta"))
    names = StoredNames(FAMILIES[config.architecture].tensors, needed, 2)

    assert names.buffer("transformer.h.0.attn.bias", (1, 1, 8, 8)) is Buffer.MASK
    assert names.buffer("h.0.attn.bias", (8, 8)) is Buffer.MASK
    assert names.buffer("h.0.attn.bias", (192,)) is None
    assert names.buffer("transformer.h.0.attn.c_attn.bias", (192,)) is None
