import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.checkpoint.config import ModelConfig
from model.errors import ModelFolderError, UnsupportedModelError
from model.families.table import FAMILIES
from model.network.rope import RotaryEmbedding, inverse_frequencies
from model.network.spec import Norm, Rotary
from tests.model.checkpoint.hf_checkpoints import CASES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
GEMMA2 = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
MULTIMODAL = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": LLAMA,
}
GRANITE = LLAMA | {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
GEMMA = LLAMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
SMOLLM3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
STABLELM = LLAMA | {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"}
OLMO2 = LLAMA | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
NEOX = LLAMA | {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
PHI = LLAMA | {"architectures": ["PhiForCausalLM"], "model_type": "phi"}
COHERE = LLAMA | {"architectures": ["CohereForCausalLM"], "model_type": "cohere"}
COHERE2 = LLAMA | {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2"}
FALCON = LLAMA | {"architectures": ["FalconForCausalLM"], "model_type": "falcon"}
STARCODER2 = LLAMA | {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
}
GPTJ = GPT2 | {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "rotary_dim": 8}
BIGCODE = GPT2 | {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode"}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 128,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}


OTHER_MODELS = re.compile(r"vision_tower|multi_modal_projector|visual\.|embed_vision")


def mixer(config, layer=0):
    return config.network.layers[layer].mixer


def windows(config):
    return [layer.mixer.window for layer in config.network.layers]


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_the_classic_and_the_transformers_5_form_give_the_same_configuration():
    classic = LLAMA | {"rope_scaling": LLAMA3_ROPE}
    new = without(LLAMA, "rope_theta", "torch_dtype") | {
        "rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0},
        "dtype": "bfloat16",
    }

    assert ModelConfig.from_dict(classic) == ModelConfig.from_dict(new)
    assert mixer(ModelConfig.from_dict(new)).rotary == Rotary(
        "llama3", 500000.0, 8.0, 256, 1.0, 4.0
    )


def test_the_oldest_key_of_the_rope_type_is_read():
    config = ModelConfig.from_dict(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}})

    assert mixer(config).rotary == Rotary("linear", 500000.0, 2.0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_written_configuration_round_trips_here_and_in_transformers(case):
    config = ModelConfig.from_dict(case.content)

    written = config.to_dict()

    assert ModelConfig.from_dict(written) == config
    if case.restated:
        return  # transformers has no such class
    theirs = getattr(transformers, f"{case.family}Config")(**written)
    again = ModelConfig.from_dict(theirs.to_dict())
    assert again == config


def test_end_tokens_of_both_files_are_merged(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": [2, 3]}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')

    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (2, 3, 5)


@pytest.mark.parametrize(
    ("key", "stated", "kept", "dropped"),
    [
        ("eos_token_id", 128, (), "[128]"),
        ("eos_token_id", [2, 128, -1, 10**30], (2,), "[128, -1, 1000"),
        ("eos_token_id", -1, (), "[-1]"),
        ("bos_token_id", [-1, 1], (2,), "[-1]"),
    ],
)
def test_token_ids_that_cannot_occur_are_dropped_and_noted(key, stated, kept, dropped):
    config = ModelConfig.from_dict(LLAMA | {key: stated})

    assert config.eos_token_ids == kept
    (note,) = config.notes
    assert note.startswith(f"{key} has {dropped}")
    assert "token ids from 0 to 127" in note


def test_an_end_token_of_the_generation_config_that_cannot_occur_is_noted_with_the_file():
    config = ModelConfig.from_dict(LLAMA, {"eos_token_id": [5, 200]})

    assert config.eos_token_ids == (2, 5)
    assert config.eos_by_file == {"config.json": (2,), "generation_config.json": (5,)}
    (note,) = config.notes
    assert note.startswith("generation_config.json: eos_token_id has [200]")


@pytest.mark.parametrize("base", [LLAMA, PHI3, QWEN3], ids=lambda it: it["model_type"])
@pytest.mark.parametrize(
    "code",
    [{"AutoModel": "evil.Model"}, {"AutoModelForCausalLM": "modeling.PhiMoEForCausalLM"}],
    ids=str,
)
def test_code_beside_a_known_architecture_is_noted_and_not_run(base, code):
    config = ModelConfig.from_dict(base | {"auto_map": code})

    assert config == ModelConfig.from_dict(base)
    (note,) = config.notes
    assert note.startswith("auto_map = {")
    assert "has no effect" in note


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({"use_sliding_window": False, "sliding_window": 64}, "sliding_window = 64 has no effect"),
        ({"sliding_window": 512}, None),
        ({"sliding_window": 4096}, None),
        ({"sliding_window": 0}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 2}, None),
        ({"use_sliding_window": True}, None),
    ],
)
def test_a_window_of_a_llama_that_changes_nothing_is_accepted(changes, noted):
    config = ModelConfig.from_dict(LLAMA | changes)

    assert windows(config) == [None, None]
    assert [note.startswith(noted) for note in config.notes] == ([True] if noted else [])


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {}},
        {"auto_map": None},
        {"clip_qkv": None},
        {"clip_qkv": False},
        {"clip_qkv": 0},
        {"attn_logit_softcapping": 0.0},
        {"final_logit_softcapping": False},
        {"attention_chunk_size": 0},
        {"attention_multiplier": None},
        {"no_rope_layers": []},
        {"no_rope_layers": [1, 1]},
        {"dual_chunk_attention_config": {}},
        {"num_local_experts": 0},
        {"num_experts": False},
        {"partial_rotary_factor": 1.0},
        {"logit_scale": 1},
        {"use_mrope": False},
        {"is_encoder_decoder": False},
        {"pretraining_tp": 1},
        {"pretraining_tp": 4},
        {"unknown_key": {"of": ["anything"]}},
        {"torch_dtype": "torch.bfloat16"},
    ],
    ids=str,
)
def test_a_key_that_changes_nothing_is_accepted(changes):
    assert ModelConfig.from_dict(LLAMA | changes) == ModelConfig.from_dict(LLAMA)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_multiplier", 0),
        ("logits_scaling", 0),
        ("clip_qkv", 6.0),
        ("no_rope_layers", [1, 0]),
        ("num_experts", 8),
        ("attention_chunk_size", 8192),
    ],
)
def test_a_key_that_changes_the_function_is_refused(key, value):
    with pytest.raises(UnsupportedModelError, match=f"{key} = "):
        ModelConfig.from_dict(LLAMA | {key: value})


@pytest.mark.parametrize("stated", ["auto", None, "", "torch.auto"])
def test_a_dtype_that_is_not_stated_is_that_of_the_files(tmp_path, stated):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": stated}))
    tensors = {
        "a": torch.zeros(64, dtype=torch.float16),
        "b": torch.zeros(8),
        "c": torch.zeros(900).long(),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")

    assert ModelConfig.from_folder(tmp_path).dtype == "float16"


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"\x02" + bytes(7) + b"[]"])
def test_without_a_readable_header_an_unstated_dtype_is_float32(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(without(LLAMA, "torch_dtype")))
    (tmp_path / "model.safetensors").write_bytes(content)

    assert ModelConfig.from_folder(tmp_path).dtype == "float32"


@pytest.mark.parametrize(("stated", "dtype"), [("half", "float16"), ("torch.float", "float32")])
def test_other_names_of_a_dtype_are_read(stated, dtype):
    assert ModelConfig.from_dict(LLAMA | {"torch_dtype": stated}).dtype == dtype


def test_absent_keys_have_the_defaults_of_transformers():
    assert windows(ModelConfig.from_dict(without(MISTRAL, "sliding_window"))) == [4096, 4096]
    assert mixer(ModelConfig.from_dict(without(QWEN3, "head_dim"))).head_dim == 128
    assert mixer(ModelConfig.from_dict(without(LLAMA, "num_key_value_heads"))).num_kv_heads == 4
    assert ModelConfig.from_dict(without(LLAMA, "torch_dtype")).dtype == "float32"
    assert mixer(ModelConfig.from_dict(QWEN2)).bias
    assert not mixer(ModelConfig.from_dict(QWEN2)).output_bias
    assert ModelConfig.from_dict(GPT2).network.norm == Norm(1e-5, "layer")
    assert ModelConfig.from_dict(OLMO2).network.norm == Norm(1e-5)


def test_absent_keys_of_gemma_have_the_defaults_of_transformers():
    changes = {"num_attention_heads": 8, "num_hidden_layers": 6}
    second, third = (
        ModelConfig.from_dict(without(it | changes, "rope_theta", "num_key_value_heads")).network
        for it in (GEMMA2, GEMMA3)
    )

    assert (second.layers[0].mixer.softcap, second.logit_softcap) == (50.0, 30.0)
    assert (third.layers[0].mixer.softcap, third.logit_softcap) == (None, None)
    assert second.rotaries == ((Rotary(theta=10_000.0), 256),)
    assert third.rotaries == ((Rotary(theta=1_000_000.0), 256), (Rotary(theta=10_000.0), 256))
    for network in (second, third):
        first = network.layers[0]
        assert (first.mixer.head_dim, first.mixer.num_kv_heads, first.mixer.scale) == (
            256,
            4,
            1 / 16,
        )
        assert first.mlp.activation == "gelu_tanh"
        assert network.tied


def test_the_language_model_of_a_multimodal_gemma_has_the_defaults_of_its_class():
    stated = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    rope = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = ModelConfig.from_dict(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "model_type": "gemma3",
            "text_config": stated | rope | {"model_type": "gemma3_text"},
            "torch_dtype": "bfloat16",
        }
    )

    assert config.network.num_parameters == 3_880_263_168
    assert (config.network.vocab, config.max_context) == (262_208, 131_072)
    assert (config.eos_token_ids, config.dtype) == ((1, 106), "bfloat16")
    assert config.network.rotaries[0] == (Rotary("linear", 1e6, 8.0), 256)


def test_a_softcap_of_null_is_no_softcap():
    config = ModelConfig.from_dict(
        GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    )

    assert (mixer(config).softcap, config.network.logit_softcap) == (None, None)


@pytest.mark.parametrize(
    ("base", "changes", "full"),
    [(GEMMA2, {}, [1, 3, 5]), (GEMMA3, {}, [5]), (GEMMA3, {"sliding_window_pattern": 3}, [2, 5])],
    ids=["gemma2", "gemma3", "stated"],
)
def test_layers_of_gemma_attend_to_a_window_and_to_all_tokens_in_turn(base, changes, full):
    config = ModelConfig.from_dict(base | changes | {"num_hidden_layers": 6, "sliding_window": 8})

    assert [i for i, window in enumerate(windows(config)) if window is None] == full


def test_the_local_theta_of_gemma_is_read_in_both_forms():
    gemma3 = GEMMA3 | {"num_hidden_layers": 6}
    classic = gemma3 | {
        "rope_theta": 5000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = without(gemma3, "rope_theta") | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }
    }

    assert ModelConfig.from_dict(classic) == ModelConfig.from_dict(new)
    assert mixer(ModelConfig.from_dict(new), 5).rotary == Rotary("linear", 5000.0, 8.0)
    assert mixer(ModelConfig.from_dict(new), 0).rotary == Rotary("default", 100.0)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(None, None, True), (True, True, True), (False, True, False), (True, False, False)],
)
def test_either_place_of_a_multimodal_config_can_say_that_the_head_is_not_tied(outer, inner, tied):
    key = "tie_word_embeddings"
    language = without(LLAMA, key) | ({} if inner is None else {key: inner})
    stated = MULTIMODAL | {"text_config": language} | ({} if outer is None else {key: outer})

    assert ModelConfig.from_dict(stated).network.tied is tied


def test_absent_keys_of_the_families_after_them_have_the_defaults_of_transformers():
    absent = "num_key_value_heads", "rope_theta", "max_position_embeddings"
    heads = {"num_attention_heads": 32, "hidden_size": 2048, "max_position_embeddings": 8192}
    gemma, phi3, smollm3, stablelm = (
        ModelConfig.from_dict(without(it, *absent) | heads).network
        for it in (GEMMA, PHI3, SMOLLM3, STABLELM)
    )

    assert [it.layers[0].mixer.num_kv_heads for it in (gemma, phi3, smollm3, stablelm)] == [
        16, 32, 4, 32,
    ]  # fmt: skip
    assert [it.tied for it in (gemma, phi3, smollm3, stablelm)] == [True, False, True, False]
    assert phi3.norm == Norm(1e-5)
    assert stablelm.norm == Norm(1e-5, "layer")
    assert gemma.rotaries == ((Rotary(), 256),)
    assert smollm3.rotaries == ((Rotary(theta=2_000_000.0), 64),)
    assert stablelm.rotaries == ((Rotary(dims=16), 64),)
    assert gemma.layers[0].mlp.activation == "gelu_tanh"
    longrope = without(LONGROPE, "original_max_position_embeddings")
    scaled = ModelConfig.from_dict(PHI3 | {"rope_scaling": longrope})
    assert mixer(scaled).rotary.original_max_positions == 4096


PHI_FILES = {
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "vocab_size": 32064,
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
}
"""Keys that the files of Phi-3-mini have in common."""
PHI4_MINI = {
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
LONG = {"max_position_embeddings": 131072, "sliding_window": 262144}


def factors(kind):
    return {"rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": kind}}


@pytest.mark.parametrize(
    ("changes", "window", "rope_type", "dims", "parameters"),
    [
        (
            {"max_position_embeddings": 4096, "sliding_window": 2047, "rope_scaling": None},
            2047, "default", None, 3_821_079_552,
        ),
        (LONG | factors("su"), None, "longrope", None, 3_821_079_552),
        (LONG | factors("longrope"), None, "longrope", None, 3_821_079_552),
        (LONG | factors("longrope") | PHI4_MINI, None, "longrope", 96, 3_836_021_760),
    ],
    ids=["Phi-3-mini-4k", "first Phi-3-mini-128k", "Phi-3.5-mini", "Phi-4-mini"],
)  # fmt: skip
def test_the_files_of_phi_are_read(changes, window, rope_type, dims, parameters):
    config = ModelConfig.from_dict(PHI3 | PHI_FILES | changes)

    assert windows(config) == [window] * 32
    rotary = mixer(config).rotary
    assert (rotary.rope_type, rotary.dims) == (rope_type, dims)
    if rope_type == "longrope":
        assert rotary.attention_factor == pytest.approx(
            math.sqrt(1 + math.log(32) / math.log(4096))
        )
        assert rotary.original_max_positions == 4096
    assert config.network.num_parameters == parameters


def test_the_file_of_smollm3_is_read():
    config = ModelConfig.from_dict(
        SMOLLM3
        | {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 128256,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "layer_types": ["full_attention"] * 36,
            "pretraining_tp": 2,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        }
    )

    rotaries = [layer.mixer.rotary for layer in config.network.layers]
    assert [it is None for it in rotaries] == [False, False, False, True] * 9
    assert rotaries[0] == Rotary(theta=5_000_000.0)
    assert config.network.num_parameters == 3_075_098_624


@pytest.mark.parametrize(
    ("changes", "dims", "parameters"),
    [
        (
            {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "vocab_size": 100352}
            | {"use_qkv_bias": True, "num_attention_heads": 32, "num_key_value_heads": 32},
            16, 1_644_515_328,
        ),
        (
            {"hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32, "vocab_size": 50304}
            | {"use_qkv_bias": False, "num_attention_heads": 32, "num_key_value_heads": 32},
            20, 2_795_443_200,
        ),
    ],
    ids=["StableLM 2 1.6B", "StableLM Zephyr 3B"],
)  # fmt: skip
def test_the_files_of_stablelm_are_read(changes, dims, parameters):
    config = ModelConfig.from_dict(STABLELM | {"partial_rotary_factor": 0.25} | changes)

    assert mixer(config).rotary.dims == dims
    assert config.network.num_parameters == parameters


@pytest.mark.parametrize(
    ("hidden", "inner", "layers", "heads", "parameters"),
    [(2048, 8192, 16, 16, 1_484_916_736), (4096, 11008, 32, 32, 7_298_617_344)],
    ids=["OLMo-2-0425-1B", "OLMo-2-1124-7B"],
)
def test_the_files_of_olmo2_are_read(hidden, inner, layers, heads, parameters):
    config = ModelConfig.from_dict(
        OLMO2
        | {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": 100257,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "pad_token_id": 100277,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        }
    )

    (layer,) = set(config.network.layers)
    assert (layer.pre_norms, layer.post_norms, layer.mixer.joint_qk_norm) == (False, True, True)
    assert layer.norm == layer.mixer.qk_norm == config.network.norm == Norm(1e-6)
    assert config.network.rotaries == ((Rotary(theta=500_000.0), 128),)
    assert (config.max_context, config.eos_token_ids) == (4096, (100257,))
    assert config.network.num_parameters == parameters


LAYER_NORM = {"layer_norm_epsilon": 1e-05}
PARALLEL_FILES = {
    "Pythia 160M": (
        NEOX,
        {"hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
        | {"num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25, "vocab_size": 50304}
        | {"use_parallel_residual": True, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048},
        162_322_944,
    ),
    "GPT-J 6B": (
        GPTJ,
        {"n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "rotary": True}
        | {"rotary_dim": 64, "tie_word_embeddings": False, "vocab_size": 50400, "scale_attn_weights": True},
        6_050_882_784,
    ),
    "Phi-2": (
        PHI,
        {"hidden_act": "gelu_new", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4}
        | {"qk_layernorm": False, "vocab_size": 51200, "tie_word_embeddings": False},
        2_779_683_840,
    ),
    "Command R7B": (
        COHERE2,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "logit_scale": 0.25}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096}
        | {"sliding_window_pattern": 4, "rotary_pct": 1.0, "vocab_size": 256000, "rope_theta": 50000}
        | {"order_of_interleaved_layers": "local_attn_first", "use_parallel_block": True},
        8_028_033_024,
    ),
    "Falcon 7B": (
        FALCON,
        {"alibi": False, "bias": False, "hidden_size": 4544, "multi_query": True, "parallel_attn": True}
        | {"new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32}
        | {"vocab_size": 65024} | LAYER_NORM,
        6_921_720_704,
    ),
    "StarCoderBase 1B": (
        BIGCODE,
        {"n_embd": 2048, "n_head": 16, "n_inner": 8192, "n_layer": 24, "n_positions": 8192}
        | {"attention_softmax_in_fp32": True, "multi_query": True, "vocab_size": 49152} | LAYER_NORM,
        1_137_207_296,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("base", "changes", "parameters"), PARALLEL_FILES.values(), ids=PARALLEL_FILES
)
def test_the_files_of_families_with_parallel_layers_and_of_starcoder_are_read(
    base, changes, parameters
):
    config = ModelConfig.from_dict(base | changes)

    assert config.network.num_parameters == parameters


def test_absent_keys_of_families_with_parallel_layers_have_the_defaults_of_transformers():
    absent = "rope_theta", "rotary_pct", "rotary_dim", "num_key_value_heads"
    heads = {"num_attention_heads": 2, "hidden_size": 256, "n_head": 2, "n_embd": 256}
    neox, gptj, phi, cohere, cohere2, falcon, bigcode = (
        ModelConfig.from_dict(without(it, *absent) | heads).network
        for it in (NEOX, GPTJ, PHI, COHERE, COHERE2, FALCON, BIGCODE)
    )

    assert [it.rotaries for it in (neox, gptj, phi, cohere, falcon)] == [
        ((Rotary(dims=32), 128),),
        ((Rotary(dims=64), 128),),
        ((Rotary(dims=64), 128),),
        ((Rotary(theta=500_000.0), 128),),
        ((Rotary(), 128),),
    ]
    assert [it.mixer.window for it in cohere2.layers] == [4096, 4096]
    assert [it.tied for it in (neox, gptj, phi, cohere, cohere2, falcon, bigcode)] == [
        False, False, False, True, True, True, True,
    ]  # fmt: skip
    assert [it.layers[0].mixer.num_kv_heads for it in (cohere, falcon, bigcode)] == [2, 1, 1]
    assert [it.layers[0].parallel for it in (neox, gptj, phi, cohere2, falcon, bigcode)] == [
        True, True, True, True, True, False,
    ]  # fmt: skip
    assert bigcode.layers[0].mlp.activation == gptj.layers[0].mlp.activation == "gelu_tanh"
    assert neox.layers[0].mlp.activation == falcon.layers[0].mlp.activation == "gelu"


def test_the_file_of_gemma_2b_is_read():
    config = ModelConfig.from_dict(
        GEMMA
        | {
            "head_dim": 256,
            "hidden_act": "gelu",
            "hidden_activation": None,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "vocab_size": 256000,
        }
    )

    assert config.network.layers[0].mlp.activation == "gelu_tanh"
    assert config.network.num_parameters == 2_506_172_416


def test_gpt2_without_an_inner_size_has_four_times_the_hidden_size():
    for changes, inner in (({}, 256), ({"n_inner": None}, 256), ({"n_inner": 96}, 96)):
        assert ModelConfig.from_dict(GPT2 | changes).network.layers[0].mlp.inner == inner


def test_the_context_of_learned_positions_is_the_length_of_their_table():
    for base in (GPT2, OPT):
        config = ModelConfig.from_dict(base)
        assert mixer(config).rotary is None
        assert config.max_context == config.network.positions.count == 512


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2, {"activation_function": "silu"}, "activation_function = 'silu'"),
        (OPT, {"do_layer_norm_before": False}, "do_layer_norm_before"),
        (OPT, {"word_embed_proj_dim": 32}, "word_embed_proj_dim = 32"),
        (OPT, {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        (OPT, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        (GEMMA, {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (PHI3, {"attention_bias": True}, "attention_bias = True"),
        (PHI3, {"lm_head_bias": True}, "lm_head_bias = True"),
        (PHI3, {"full_attn_mod": 2}, "full_attn_mod = 2"),
        (PHI3, {"interpolate_factor": 2}, "interpolate_factor = 2"),
        (PHI3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        (PHI3, {"rope_scaling": LONGROPE | {"long_mscale": 1.2}}, "rope_scaling.long_mscale = 1.2"),
        (NEOX, {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu'"),
        (GPTJ, {"activation_function": "silu"}, "activation_function = 'silu'"),
        (PHI, {"qk_layernorm": True}, "qk_layernorm = True"),
        (COHERE, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (FALCON, {"alibi": True}, "alibi = True"),
        (FALCON, {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2"),
        (FALCON, {"new_decoder_architecture": True}, "num_ln_in_parallel_attn"),
        (BIGCODE, {"scale_attn_weights": False}, "scale_attn_weights"),
        (STABLELM, {"qk_layernorm": True}, "qk_layernorm = True"),
        (OLMO2, {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        (OLMO2, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (SMOLLM3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        (GEMMA3, {"model_type": "gemma3"}, "goes with model_type 'gemma3_text'"),
        (
            GEMMA3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope type 'linear' of sliding_attention",
        ),
    ],
)
def test_an_unsupported_variant_of_a_family_is_rejected_with_its_key(base, changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        ModelConfig.from_dict(base | changes)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (GPT2, {"n_embd": None}, "n_embd is missing"),
        (GPT2, {"n_embd": -1}, "n_embd must be .*, found -1"),
        (OPT, {"ffn_dim": 0}, "ffn_dim must be"),
        (GEMMA2, {"final_logit_softcapping": 0.0}, "final_logit_softcapping must be"),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be"),
        (GEMMA3, {"rope_local_base_freq": 0}, "rope_local_base_freq must be"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern must be"),
        (MULTIMODAL, {"text_config": 3}, "text_config must be an object, found 3"),
        (
            MULTIMODAL,
            {"text_config": {"vocab_size": -1}},
            "text_config.vocab_size must be .*, found -1",
        ),
        (GRANITE, {"residual_multiplier": 0}, "residual_multiplier must be"),
        (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers must have .* each of 2 layers, found 1"),
        (SMOLLM3, {"no_rope_layers": [1, 2]}, r"no_rope_layers\[1\] must be .*, found 2"),
        (SMOLLM3, {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be"),
        (STABLELM, {"partial_rotary_factor": 0.1}, "even number, 4 or more, .*, found 1"),
        (PHI3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be"),
        (STARCODER2, {"norm_epsilon": "x"}, "norm_epsilon must be a number, found 'x'"),
        (NEOX, {"rotary_pct": 2}, "rotary_pct must be"),
        (GPTJ, {"rotary_dim": 7}, "rotary_dim must be an even number .* 16 dimensions .*, found 7"),
        (GPTJ, {"rotary_dim": 18}, "rotary_dim must be an even number .*, found 18"),
        (COHERE, {"logit_scale": 0}, "logit_scale must be"),
        (FALCON, {"ffn_hidden_size": 0}, "ffn_hidden_size must be"),
        (BIGCODE, {"multi_query": 1}, "multi_query must be"),
    ],
)
def test_the_error_for_an_invalid_value_names_the_key_of_the_family(base, changes, message):
    with pytest.raises(ModelFolderError, match=message):
        ModelConfig.from_dict(base | changes)


def test_a_qwen_window_applies_only_if_it_is_enabled():
    stated = {"sliding_window": 32, "max_window_layers": 1}

    unused = ModelConfig.from_dict(QWEN2 | stated)
    used = ModelConfig.from_dict(QWEN2 | stated | {"use_sliding_window": True})

    assert windows(unused) == [None, None]
    assert windows(used) == [None, 32]


def test_a_window_that_no_layer_uses_is_dropped():
    config = ModelConfig.from_dict(
        QWEN2 | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
    )

    assert windows(config) == [None, None]


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        (LLAMA3_ROPE, 512),
        (LONGROPE, 512),
    ],
)
def test_the_maximum_context_is_the_extended_one(scaling, context):
    assert ModelConfig.from_dict(LLAMA | {"rope_scaling": scaling}).max_context == context


def test_yarn_without_a_factor_uses_the_ratio_of_the_contexts():
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128}

    config = ModelConfig.from_dict(LLAMA | {"rope_scaling": rope})

    assert mixer(config).rotary.factor == 4.0
    assert mixer(config).rotary.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "BloomForCausalLM"),
        ({"architectures": None, "model_type": "gemma3n_vision"}, "gemma3n_vision"),
        ({"model_type": "mistral"}, "mistral"),
        ({"quantization_config": {"quant_method": "exl2"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "'proportional'"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.25"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters.full_attention",
        ),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ],
)
def test_an_unsupported_feature_is_rejected_with_its_key(changes, named):
    with pytest.raises(UnsupportedModelError, match=named.replace("(", r"\(")):
        ModelConfig.from_dict(LLAMA | changes)


def test_the_error_for_an_unsupported_architecture_lists_the_supported_ones():
    with pytest.raises(
        UnsupportedModelError,
        match="LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    ):
        ModelConfig.from_dict(LLAMA | {"architectures": ["BloomForCausalLM"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be .* <= 1024, found 1000000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"hidden_size": -64}, "hidden_size must be .*, found -64"),
        ({"hidden_size": "64"}, "hidden_size must be .*, found '64'"),
        ({"hidden_size": 64.0}, "hidden_size must be"),
        ({"hidden_size": True}, "hidden_size must be .*, found True"),
        ({"hidden_size": 66}, "hidden_size = 66 must be a multiple of num_attention_heads = 4"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 10**12}, "vocab_size must be"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads = 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be"),
        ({"head_dim": 7}, "head_dim must be an even number .*, found 7"),
        ({"hidden_size": 12}, "head_dim must be an even number .*, found 3"),
        ({"head_dim": 10**6}, "head_dim must be"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings must be"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be"),
        ({"rope_theta": 0}, "rope_theta must be"),
        ({"rope_theta": float("inf")}, "rope_theta must be"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"architectures": [1]}, r"architectures\[0\] must be a string, found 1"),
        ({"architectures": None, "model_type": None}, "both missing"),
        ({"eos_token_id": [2, "3"]}, r"eos_token_id\[1\] must be a whole number, found '3'"),
        ({"torch_dtype": 16}, "torch_dtype must be a string, found 16"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "rope_scaling.factor must be"),
        ({"rope_scaling": LONGROPE | {"long_factor": None}}, "rope_scaling.long_factor is missing"),
        (
            {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 7}},
            "short_factor of the rope parameters must have head_dim / 2 = 8 numbers, found 7",
        ),
        ({"rope_scaling": LONGROPE | {"short_factor": [0.0] * 8}}, r"short_factor\[.*must be"),
        (
            {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}},
            "high_freq_factor = 1 must be greater than low_freq_factor = 1",
        ),
        (
            {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": -1}},
            "original_max_position_embeddings must be",
        ),
    ],
)
def test_the_error_for_an_invalid_value_names_key_and_limit(changes, message):
    with pytest.raises(ModelFolderError, match=message):
        ModelConfig.from_dict(LLAMA | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of .* = 2"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window is false"),
    ],
)
def test_the_error_for_an_invalid_window_names_the_key(changes, message):
    with pytest.raises(ModelFolderError, match=message):
        ModelConfig.from_dict(QWEN2 | changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "must hold a JSON object, found list"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b" " * (5 * 2**20), "at most 4194304"),
    ],
)
def test_the_error_for_a_broken_file_names_it(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ModelFolderError, match=message) as raised:
        ModelConfig.from_folder(tmp_path)

    assert str(tmp_path / "config.json") in str(raised.value)


@pytest.mark.parametrize(
    "content", [b'{"model_type": "\\ud800"}', b'{"\\udc00": 1}', b'{"x": "\xed\xa0\x80"}']
)
def test_text_with_a_lone_surrogate_is_an_error(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ModelFolderError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_folder(tmp_path)


def test_the_error_for_an_invalid_value_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": -1}))

    with pytest.raises(ModelFolderError, match=r"config\.json: hidden_size"):
        ModelConfig.from_folder(tmp_path)


def test_a_long_value_is_shortened_in_the_error():
    with pytest.raises(ModelFolderError) as raised:
        ModelConfig.from_dict(LLAMA | {"hidden_size": "x" * 10_000})

    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_the_error_for_a_folder_without_a_configuration_names_it(tmp_path, name):
    (tmp_path / "empty").mkdir()

    with pytest.raises(ModelFolderError, match=name):
        ModelConfig.from_folder(tmp_path / name)


def test_the_parameter_count_equals_that_of_the_checkpoint():
    for case in CASES.values():
        model = case.build()
        config = ModelConfig.from_dict(model.config.to_dict() | case.restated)

        scales = (
            (name, it) for name, it in model.named_buffers() if name.endswith(".layer_scalar")
        )
        language_model = [
            it.numel()
            for name, it in (*model.named_parameters(), *scales)
            if not OTHER_MODELS.search(name)
        ]
        assert config.network.num_parameters == sum(language_model)


def test_every_family_is_in_the_document_of_models():
    table = (Path(__file__).parents[3] / "docs" / "models.md").read_text()

    assert [name for name in FAMILIES if f"| `{name}` |" not in table] == []


NUMBERS = st.one_of(st.integers(-1, 300), st.integers(), st.floats(), st.floats(0.5, 64))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)
ROPE = st.fixed_dictionaries(
    {
        "rope_type": st.sampled_from(
            ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "su"]
        )
    },
    optional={
        key: st.one_of(NUMBERS, JSON)
        for key in (
            "factor",
            "rope_theta",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "alpha",
            "llama_4_scaling_beta",
            "mrope_section",
        )
    }
    | {key: st.just([1.5] * 8) | JSON for key in ("short_factor", "long_factor")},
)


BASES = [
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, MULTIMODAL, GPT2, OPT, GRANITE, STARCODER2, PHI3, SMOLLM3,
    STABLELM, OLMO2, NEOX, GPTJ, PHI, COHERE, COHERE2, FALCON, BIGCODE,
    *(
        LLAMA | {"architectures": [name], "model_type": FAMILIES[name].model_type}
        for name in (
            "Ministral3ForCausalLM", "Olmo3ForCausalLM", "Exaone4ForCausalLM", "ExaoneForCausalLM",
            "HunYuanDenseV1ForCausalLM", "ApertusForCausalLM", "NemotronForCausalLM", "MiniCPMForCausalLM",
            "InternLM3ForCausalLM", "CwmForCausalLM", "Qwen2VLForConditionalGeneration",
        )
    ),
    MULTIMODAL | {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"},
]  # fmt: skip
FURTHER_KEYS = (
    "attn_logit_softcapping",
    "auto_map",
    "bias",
    "dim_model_base",
    "enable_bias",
    "embedding_multiplier",
    "final_logit_softcapping",
    "hidden_activation",
    "logit_scale",
    "logits_scaling",
    "multi_query",
    "n_inner",
    "norm_eps",
    "num_layers",
    "no_rope_layer_interval",
    "new_decoder_architecture",
    "no_rope_layers",
    "num_ln_in_parallel_attn",
    "parallel_attn",
    "partial_rotary_factor",
    "qk_layernorm",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "rope_parameters",
    "rotary_dim",
    "rotary_emb_base",
    "rotary_pct",
    "scale_depth",
    "scale_emb",
    "sliding_window",
    "sliding_window_pattern",
    "text_config",
    "use_qk_norm",
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(
    base=st.sampled_from(BASES),
    changes=st.fixed_dictionaries(
        {},
        optional={"rope_scaling": ROPE | JSON, "layer_types": JSON, "use_sliding_window": JSON}
        | {key: st.one_of(NUMBERS, JSON) for key in LLAMA | GPT2 | OPT}
        | {key: st.one_of(NUMBERS, JSON) for key in FURTHER_KEYS},
    ),
)
def test_any_value_of_any_key_is_either_read_or_rejected(base, changes):
    try:
        config = ModelConfig.from_dict(base | changes)
    except (ModelFolderError, UnsupportedModelError):
        return

    assert config.network.num_parameters > 0
    assert config.max_context >= 1
    for rotary, dim in config.network.rotaries:
        assert inverse_frequencies(rotary, dim).shape == (dim // 2,)
        RotaryEmbedding(rotary, dim).dense(torch.arange(3), torch.float32)
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_reading_a_configuration_does_not_import_torch():
    code = (
        f"import sys; from model.checkpoint.config import ModelConfig; import model.hub.resolve; \
ModelConfig.from_dict({LLAMA!r}); assert 'torch' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
