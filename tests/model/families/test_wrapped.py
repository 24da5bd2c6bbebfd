"""Language models within multimodal models: the names of their tensors, the places of their keys, what is refused."""

import pytest
import torch

from model.checkpoint.config import ModelConfig
from model.errors import ModelFolderError, UnsupportedModelError
from model.families.table import FAMILIES
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.model.families.checkpoints import (
    edit_config,
    expected_logits,
    load,
    logits,
    rename,
)

PREFIXES = ["model.language_model.", "language_model.model.", "language_model.", "model.", ""]
ENCODERS = ("visual.", "vision_tower.", "multi_modal_projector.")
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WRAPPED = [name for name, family in FAMILIES.items() if family.part]


def of(architecture, **keys):
    model_type = FAMILIES[architecture].model_type
    return {"architectures": [architecture], "model_type": model_type, **keys}


def split(name):
    """Return the part of a tensor's name after the prefix of the language model, and whether it belongs to that."""
    for prefix in (*PREFIXES[:3], "model."):
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith(ENCODERS):
            return name.removeprefix(prefix), True
    return name.removeprefix("model."), not name.removeprefix("model.").startswith(ENCODERS)


@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda it: it or "none")
@pytest.mark.parametrize("encoder", ["", "model."])
@pytest.mark.parametrize("case", ["qwen3 vl", "qwen2.5 vl", "mistral3"])
def test_tensors_are_found_under_every_prefix_beside_those_of_an_image_encoder(
    tmp_path, case, prefix, encoder
):
    oracle = CASES[case].save(tmp_path)

    def renamed(name):
        inner, is_text = split(name)
        if not is_text:
            return encoder + inner
        if inner.startswith("lm_head."):
            return ("language_model." if prefix == "language_model.model." else "") + inner
        return prefix + inner

    rename(tmp_path, renamed)

    model = load(tmp_path)

    assert torch.equal(model.embed_tokens, oracle.get_input_embeddings().weight)
    assert torch.equal(model.norm, oracle.model.language_model.norm.weight)


@pytest.mark.parametrize("case", ["qwen2.5 vl", "qwen2 vl tied windows"])
def test_a_flat_config_json_states_the_language_model_beside_the_encoder(tmp_path, case):
    oracle = CASES[case].save(tmp_path)

    def flattened(config):
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        classic = {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        }
        return text | config | classic

    edit_config(tmp_path, flattened)

    found, expected = logits(tmp_path), expected_logits(oracle)

    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("architecture", "outer", "inner", "tied"),
    [
        ("Qwen3VLForConditionalGeneration", None, None, False),
        ("Qwen3VLForConditionalGeneration", True, None, True),
        ("Qwen3VLForConditionalGeneration", None, True, True),
        ("Qwen3VLForConditionalGeneration", False, True, False),
        ("Qwen2_5_VLForConditionalGeneration", False, True, True),
        ("Qwen2VLForConditionalGeneration", True, None, True),
        ("Qwen2VLForConditionalGeneration", None, None, False),
        ("Mistral3ForConditionalGeneration", None, None, False),
        ("Mistral3ForConditionalGeneration", None, True, True),
        ("Mistral3ForConditionalGeneration", True, False, True),
        ("Mistral3ForConditionalGeneration", False, None, False),
    ],
)
def test_the_head_is_tied_as_the_class_of_the_family_decides(architecture, outer, inner, tied):
    text = TEXT | ({} if inner is None else {"tie_word_embeddings": inner})
    stated = {} if outer is None else {"tie_word_embeddings": outer}

    config = ModelConfig.from_dict(of(architecture, text_config=text, **stated))

    assert config.network.tied is tied


def test_a_tie_that_is_neither_true_nor_false_is_an_error():
    config = of("Qwen3VLForConditionalGeneration", text_config=TEXT, tie_word_embeddings="yes")

    with pytest.raises(ModelFolderError, match="tie_word_embeddings must be true or false"):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize("architecture", WRAPPED)
def test_a_part_that_is_no_object_is_an_error(architecture):
    with pytest.raises(ModelFolderError, match="text_config must be an object, found 3"):
        ModelConfig.from_dict(of(architecture, text_config=3))


def test_another_language_model_of_mistral3_is_refused_by_name():
    config = of("Mistral3ForConditionalGeneration", text_config=TEXT | {"model_type": "mamba"})

    with pytest.raises(
        UnsupportedModelError,
        match=r"text_config.model_type = 'mamba' .* supported are mistral, ministral3",
    ):
        ModelConfig.from_dict(config)


def test_sections_of_a_rotation_are_refused_where_no_image_can_be():
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    config = of("Qwen2ForCausalLM", **TEXT, rope_parameters=rope)

    with pytest.raises(UnsupportedModelError, match="mrope_section"):
        ModelConfig.from_dict(config)


QWEN3_VL_2B = {
    "image_token_id": 151655,
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "vision_config": {"depth": 24, "model_type": "qwen3_vl"},
}
QWEN2_5_VL_3B = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_act": "silu", "model_type": "qwen2_5_vl"},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}
MISTRAL_SMALL = {
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "pixtral"},
}
MINISTRAL_3B = {
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 26,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": True,
        "vocab_size": 131072,
    },
    "dtype": "bfloat16",
    "vision_config": {"model_type": "pixtral"},
}


@pytest.mark.parametrize(
    ("architecture", "keys", "parameters", "context"),
    [
        ("Qwen3VLForConditionalGeneration", QWEN3_VL_2B, 1_720_574_976, 262_144),
        ("Qwen2_5_VLForConditionalGeneration", QWEN2_5_VL_3B, 3_085_938_688, 128_000),
        ("Mistral3ForConditionalGeneration", MISTRAL_SMALL, 23_572_403_200, 131_072),
        ("Mistral3ForConditionalGeneration", MINISTRAL_3B, 3_429_006_336, 262_144),
    ],
    ids=["Qwen3-VL-2B", "Qwen2.5-VL-3B", "Mistral-Small-3.1", "Ministral-3-3B"],
)
def test_the_files_of_multimodal_models_are_read(architecture, keys, parameters, context):
    config = ModelConfig.from_dict(of(architecture, **keys))

    assert config.network.num_parameters == parameters
    assert (config.max_context, config.dtype) == (context, "bfloat16")
