"""What the metadata of GGUF files become: configurations, end tokens and sampling parameters."""

import gguf
import numpy as np
import pytest
import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.generation_config import read_sampling_defaults
from model.checkpoint.weights import load_model
from model.errors import ModelError, UnsupportedModelError
from tests.model.gguf.written import add_bytes, finish_alone, write

U32, F32, TEXT, BOOL = (gguf.GGUFValueType[it] for it in ("UINT32", "FLOAT32", "STRING", "BOOL"))
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"


def made(path, arch="llama", metadata=None, tokenizer=add_bytes, **changes):
    write(path / "x.gguf", arch, "Q8_0", metadata, tokenizer, **changes)
    return path / "x.gguf"


def test_numbers_are_those_that_were_rounded_to_float32(tmp_path):
    config = ModelConfig.from_folder(made(tmp_path, rms_norm_eps=1e-6))

    assert config.network.norm.eps == 1e-6
    assert config.content["rope_theta"] == 10_000.0
    assert config.weight_format.name == "Q8_0"
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("arch", "kind", "dtype"),
    [
        ("llama", "F32", "float32"), ("llama", "F16", "float16"), ("llama", "BF16", "bfloat16"),
        ("gemma3", "F16", "bfloat16"),
    ],
)  # fmt: skip
def test_full_numbers_have_the_dtype_of_most_of_them(tmp_path, arch, kind, dtype):
    file = tmp_path / "x.gguf"
    write(file, arch, lambda name: "Q8_0" if name == "token_embd.weight" else kind)

    config = ModelConfig.from_folder(file)

    assert (config.dtype, config.weight_format) == (dtype, None)


def test_most_bytes_name_the_type(tmp_path):
    file = tmp_path / "x.gguf"
    write(file, "llama", lambda name: "Q6_K" if "ffn_down" in name else "Q4_K")

    assert ModelConfig.from_folder(file).weight_format.name == "Q4_K"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("expert_count", (8, U32), "llama.expert_count = 8 is not supported"),
        ("logit_scale", (0.5, F32), "llama.logit_scale = 0.5 is not supported"),
        ("rope.scaling.type", ("dynamic", TEXT), "llama.rope.scaling.type = 'dynamic' is not supported"),
        ("rope.dimension_count", (32, U32), "rope.dimension_count = 32 is not supported with heads of 64"),
        ("attention.value_length", (32, U32), "values of 32 dimensions beside keys of 64"),
        ("attention.head_count", (0, U32), "attention.head_count must be at least 1"),
        ("attention.layer_norm_rms_epsilon", ("x", TEXT), "must be a number, found 'x'"),
        ("attention.layer_norm_rms_epsilon", (float("nan"), F32), "must be a number, found nan"),
        ("context_length", (True, BOOL), "context_length must be a whole number, found True"),
        ("embedding_length", (0, U32), "hidden_size must be"),
        ("block_count", (5000, U32), "num_hidden_layers must be"),
    ],
)  # fmt: skip
def test_what_is_not_supported_or_wrong_is_named(tmp_path, key, value, says):
    file = made(tmp_path, metadata={f"llama.{key}": value})

    with pytest.raises(ModelError) as raised:
        ModelConfig.from_folder(file)

    assert says in str(raised.value)
    assert str(raised.value).startswith(str(file))


@pytest.mark.parametrize("key", ["embedding_length", "attention.head_count", "block_count"])
def test_a_key_that_is_missing_is_named(tmp_path, key):
    finish_alone(tmp_path / "x.gguf", without=f"llama.{key}")

    with pytest.raises(ModelError, match=f"llama.{key} must be a whole number, which is missing"):
        ModelConfig.from_folder(tmp_path / "x.gguf")


def test_one_of_two_lists_of_factors_is_an_error(tmp_path):
    write(
        tmp_path / "x.gguf", "phi3", tensors={"rope_factors_long.weight": np.ones(32, np.float32)}
    )

    with pytest.raises(ModelError, match="has only one of rope_factors_short"):
        ModelConfig.from_folder(tmp_path / "x.gguf")


def test_numbers_by_layer_are_one_number_if_they_are_equal(tmp_path):
    lists = {"llama.attention.head_count_kv": ([2, 2], gguf.GGUFValueType.ARRAY)}
    config = ModelConfig.from_folder(made(tmp_path, metadata=lists))
    assert config.network.layers[0].mixer.num_kv_heads == 2

    lists = {"llama.attention.head_count_kv": ([2, 1], gguf.GGUFValueType.ARRAY)}
    with pytest.raises(UnsupportedModelError, match="head_count_kv differs from layer to layer"):
        ModelConfig.from_folder(made(tmp_path, metadata=lists))


def test_the_end_of_a_turn_in_the_template_ends_a_generation(tmp_path):
    def base(writer):
        add_bytes(writer)
        writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = 300

    def chat(writer):
        base(writer)
        writer.add_chat_template(CHAT)

    assert ModelConfig.from_folder(made(tmp_path, tokenizer=base)).eos_token_ids == (300,)
    assert ModelConfig.from_folder(made(tmp_path, tokenizer=chat)).eos_token_ids == (300, 257)


def test_end_tokens_that_the_vocabulary_lacks_are_left_out(tmp_path, caplog):
    ends = {
        f"tokenizer.ggml.{name}_token_id": (it, U32) for name, it in (("eot", 258), ("eom", 99999))
    }

    file = made(tmp_path, metadata=ends)
    config = ModelConfig.from_folder(file)

    assert config.eos_token_ids == (257, 258)
    load_model(file, config, torch.float32, "cpu")
    assert "the token 99999 of 320 have no effect here" in caplog.text


def test_keys_that_are_not_read_are_said_once_when_the_weights_are_loaded(tmp_path, caplog):
    file = made(
        tmp_path, metadata={"llama.new_feature": (3, U32), "llama.tensor_data_layout": ("x", TEXT)}
    )
    config = ModelConfig.from_folder(file)
    assert caplog.text == ""

    load_model(file, config, torch.float32, "cpu")

    assert caplog.text.count("llama.new_feature have no effect here") == 1
    assert "tensor_data_layout" not in caplog.text


def test_a_linear_scale_of_old_files_is_read(tmp_path):
    file = made(tmp_path, metadata={"llama.rope.scale_linear": (4.0, F32)})

    rotary = ModelConfig.from_folder(file).network.layers[0].mixer.rotary
    assert (rotary.rope_type, rotary.factor) == ("linear", 4.0)


def test_the_sampling_parameters_of_a_file_are_defaults(tmp_path, caplog):
    sampling = {
        "general.sampling.temp": (0.7, F32), "general.sampling.top_k": (20, U32), "general.sampling.top_p": (0.8, F32),
        "general.sampling.penalty_repeat": (1.05, F32), "general.sampling.mirostat": (2, U32),
    }  # fmt: skip
    defaults = read_sampling_defaults(made(tmp_path, metadata=sampling))

    assert (defaults.top_k, defaults.min_p) == (20, 0.0)
    assert np.float32(defaults.temperature) == np.float32(0.7)
    assert np.float32(defaults.repetition_penalty) == np.float32(1.05)
    assert "mirostat = 2 have no effect here" in caplog.text
