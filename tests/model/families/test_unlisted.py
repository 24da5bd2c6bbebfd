"""Decoders of transformers that are in no table of ours, as far as config.json tells."""

import pytest

from model.checkpoint.config import ModelConfig
from model.errors import ModelFolderError, UnsupportedModelError

OLMO = {
    "architectures": ["OlmoForCausalLM"],
    "model_type": "olmo",
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("backend", ["transformers", "auto"])
def test_vocabulary_context_and_ends_are_read_from_config_json(backend):
    config = ModelConfig.from_dict(OLMO, backend=backend)

    assert config.network.modules.model_type == "olmo"
    assert (config.architecture, config.network.vocab) == ("OlmoForCausalLM", 128)
    assert (config.max_context, config.eos_token_ids) == (512, (7,))


def test_features_that_our_executors_lack_are_those_of_the_library():
    config = ModelConfig.from_dict(OLMO | {"num_experts": 8, "clip_qkv": 3}, backend="transformers")

    assert config.network.modules is not None


@pytest.mark.parametrize("key", ["n_positions", "n_ctx", "max_seq_len", "seq_length"])
def test_other_names_of_the_context_are_read(key):
    content = {name: it for name, it in OLMO.items() if name != "max_position_embeddings"}

    assert ModelConfig.from_dict(content | {key: 99}, backend="auto").max_context == 99


def test_a_text_model_among_others_is_read():
    content = {"architectures": ["ItForCausalLM"], "model_type": "it", "text_config": OLMO}

    config = ModelConfig.from_dict(content, backend="auto")

    assert (config.network.vocab, config.max_context) == (128, 512)


@pytest.mark.parametrize(
    ("backend", "has_modules"), [("auto", False), ("transformers", True), ("tessera", False)]
)
def test_only_transformers_takes_the_families_that_are_ours(backend, has_modules):
    config = ModelConfig.from_dict(LLAMA, backend=backend)

    assert (config.network.modules is not None) == has_modules


def test_an_architecture_that_is_not_ours_is_refused_with_the_backend_that_may_serve_it():
    with pytest.raises(
        UnsupportedModelError,
        match=r"'OlmoForCausalLM' is not supported; .*; --model-backend transformers serves it, more slowly, if the"
        r" installed library transformers has it",
    ):
        ModelConfig.from_dict(OLMO)


def test_a_mixture_of_experts_is_refused_with_the_backend_that_may_serve_it():
    content = OLMO | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    with pytest.raises(
        UnsupportedModelError, match="mixture of experts; --model-backend transformers"
    ):
        ModelConfig.from_dict(content)


def test_an_encoder_is_refused_without_a_hint_that_would_not_help():
    content = OLMO | {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    with pytest.raises(UnsupportedModelError) as refusal:
        ModelConfig.from_dict(content)
    assert "--model-backend" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model_type": None}, UnsupportedModelError, "model_type is missing"),
        ({"vocab_size": None}, ModelFolderError, "vocab_size is missing"),
        ({"max_position_embeddings": None}, ModelFolderError, "max_position_embeddings is missing"),
        ({"is_encoder_decoder": True}, UnsupportedModelError, "is_encoder_decoder = True"),
        ({"add_cross_attention": True}, UnsupportedModelError, "add_cross_attention = True"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
         UnsupportedModelError, "full numbers alone, and this one is quantized"),
    ],
)  # fmt: skip
def test_what_no_module_of_the_library_takes_is_refused(changes, error, said):
    with pytest.raises(error, match=said):
        ModelConfig.from_dict(OLMO | changes, backend="transformers")
