"""Names of architectures, keys and tensors that only some files have."""

import pytest
import torch

from model.checkpoint.config import ModelConfig
from model.errors import UnsupportedModelError, WeightsError
from model.families.table import FAMILIES, find_architecture
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.model.families.checkpoints import (
    add_tensors,
    edit_config,
    expected_logits,
    load,
    logits,
    rename,
)


def state(folder, architecture, model_type, **keys):
    """Let config.json name an architecture."""
    named = {"architectures": [architecture], "model_type": model_type}
    edit_config(folder, lambda config: config | named | keys)


def check(folder, oracle):
    found, expected = logits(folder), expected_logits(oracle)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("architecture", "model_type"), [("LLaMAForCausalLM", "llama"), ("AquilaModel", "aquila")]
)
def test_a_llama_of_another_name_has_the_logits_of_llama(tmp_path, architecture, model_type):
    oracle = CASES["llama"].save(tmp_path)
    state(tmp_path, architecture, model_type)

    check(tmp_path, oracle)


def test_the_norms_of_the_first_yi_have_other_names(tmp_path):
    oracle = CASES["llama"].save(tmp_path)
    state(tmp_path, "YiForCausalLM", "Yi")
    rename(
        tmp_path,
        lambda name: name.replace("input_layernorm", "ln1").replace(
            "post_attention_layernorm", "ln2"
        ),
    )

    check(tmp_path, oracle)


@pytest.mark.parametrize(
    ("names", "model_type", "found"),
    [
        (["LlamaForCausalLM"], "exaone", "ExaoneForCausalLM"),
        (["ExaoneForCausalLM"], "exaone", "ExaoneForCausalLM"),
        (["ExaoneForCausalLM"], None, "ExaoneForCausalLM"),
        (["LlamaForCausalLM"], "internlm3", "InternLM3ForCausalLM"),
        (["AquilaModel"], None, "AquilaForCausalLM"),
        (["LLaMAForCausalLM"], None, "LlamaForCausalLM"),
        (None, "llama", "LlamaForCausalLM"),
        (None, "aquila", "AquilaForCausalLM"),
        (["LlamaForCausalLM"], None, "LlamaForCausalLM"),
        (["Ernie4_5_ForCausalLM"], "ernie4_5", "Ernie4_5ForCausalLM"),
    ],
)
def test_the_family_is_found_by_architecture_and_model_type(names, model_type, found):
    assert find_architecture({"architectures": names, "model_type": model_type}) == found


@pytest.mark.parametrize(
    ("names", "model_type"),
    [
        (["LlamaForCausalLM"], "aquila"),
        (["ExaoneForCausalLM"], "llama"),
        (["AquilaModel"], "llama"),
    ],
)
def test_an_architecture_with_the_model_type_of_another_is_refused(names, model_type):
    with pytest.raises(UnsupportedModelError, match=rf"{names[0]}.*not supported"):
        find_architecture({"architectures": names, "model_type": model_type})


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_no_two_families_have_the_same_model_type(family):
    same = [it.architecture for it in FAMILIES.values() if it.model_type == family.model_type]

    assert same == [family.architecture]


@pytest.mark.parametrize("architecture", ["ExaoneForCausalLM", "LlamaForCausalLM"])
def test_exaone_has_keys_of_its_own_beside_its_code(tmp_path, architecture):
    oracle = CASES["exaone"].save(tmp_path)

    def written(config):
        rope = config.pop("rope_parameters")
        return config | {
            "architectures": [architecture],
            "auto_map": {"AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"},
            "activation_function": config.pop("hidden_act"),
            "layer_norm_epsilon": config.pop("rms_norm_eps"),
            "num_layers": config.pop("num_hidden_layers"),
            "rope_theta": rope["rope_theta"],
        }

    edit_config(tmp_path, written)

    check(tmp_path, oracle)


def test_internlm3_has_keys_of_its_own(tmp_path):
    oracle = CASES["internlm3"].save(tmp_path)

    def written(config):
        rope = config.pop("rope_parameters")
        return config | {
            "architectures": ["InternLM3ForCausalLM"],
            "bias": config.pop("mlp_bias"),
            "qkv_bias": config.pop("attention_bias"),
            "rope_scaling": {"rope_type": "dynamic", "factor": rope["factor"]},
        }

    edit_config(tmp_path, written)

    check(tmp_path, oracle)


def test_the_sparse_attention_of_minicpm_is_refused(tmp_path):
    CASES["llama"].save(tmp_path)
    state(tmp_path, "MiniCPMForCausalLM", "minicpm", sparse_config={"kernel_size": 32})

    with pytest.raises(UnsupportedModelError, match="sparse_config"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constants_of_xielu_are_compared_with_those_that_the_network_has(tmp_path, dtype):
    CASES["apertus"].save(tmp_path)
    names = [f"model.layers.{layer}.mlp.act_fn" for layer in range(2)]
    stored = {f"{it}.beta": torch.tensor(0.5, dtype=dtype) for it in names}
    stored |= {f"{it}.eps": torch.tensor(-1e-6, dtype=dtype) for it in names}
    add_tensors(tmp_path, stored)
    load(tmp_path)

    add_tensors(tmp_path, {f"{names[1]}.beta": torch.tensor(0.75, dtype=dtype)})

    with pytest.raises(
        WeightsError, match=r"layers\.1\.mlp\.act_fn\.beta must be 0\.5, found \[0\.75\]"
    ):
        load(tmp_path)


def test_files_without_the_constants_of_xielu_are_read(tmp_path):
    oracle = CASES["apertus"].save(tmp_path)
    rename(tmp_path, lambda name: None if name.endswith((".beta", ".eps")) else name)

    check(tmp_path, oracle)
