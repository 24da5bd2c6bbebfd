"""GGUF files of Granite, Granite 4 H, Bamba and Falcon-H1 compared with transformers on the same weights."""

import gguf
import pytest
import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.errors import ModelError, UnsupportedModelError, WeightsError
from model.network.mixers import Mamba2, Parallel
from model.network.spec import Attention
from model.text.tokenizer import Tokenizer
from tests.model.gguf.test_parity import TOLERANCE, difference, load
from tests.model.gguf.written import add_bytes
from tests.model.gguf.written import write as write_other
from tests.model.gguf.written_hybrids import HYBRIDS, write

U32, F32, BOOL, ARRAY = (gguf.GGUFValueType[it] for it in ("UINT32", "FLOAT32", "BOOL", "ARRAY"))
ROPE = {"position_embedding_type": "rope"}
BIASES = {"attention_bias": True, "mlp_bias": True}
# The conversion multiplies biases of q, k and v by the multiplier of the input too.
FALCON_BIASES = BIASES | {"projectors_bias": True, "attention_in_multiplier": 1.0}


@pytest.mark.parametrize("arch", [*HYBRIDS, "bamba"])
@pytest.mark.parametrize(
    "kind",
    [
        "F32",
        "Q4_K",
        *(pytest.param(it, marks=pytest.mark.slow) for it in ("F16", "BF16", "Q8_0", "Q6_K")),
    ],
)
def test_each_type_of_tensor_gives_the_tokens_of_transformers(tmp_path, arch, kind):
    file = tmp_path / "model.gguf"
    oracle = write(file, arch, kind)

    largest, is_same = difference(load(file), oracle)

    assert largest < TOLERANCE
    assert is_same


CASES = {
    "granite tied biases": ("granite", BIASES | {"tie_word_embeddings": True}),
    "granite4 rope": ("granitehybrid", ROPE),
    "granite4 tied": ("granitehybrid", {"tie_word_embeddings": True}),
    "granite4 rope tied biases": (
        "granitehybrid",
        ROPE | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "granite4 groups, biases of mamba": (
        "granitehybrid",
        {"mamba_n_groups": 2, "mamba_proj_bias": True, "mamba_conv_bias": False},
    ),
    "granite4 one expansion": (
        "granitehybrid",
        {"mamba_expand": 1, "mamba_n_heads": 4, "mamba_d_state": 32},
    ),
    "bamba tied biases": ("bamba", BIASES | {"tie_word_embeddings": True}),
    "bamba several": ("bamba", {"num_hidden_layers": 4, "attn_layer_indices": [0, 3]}),
    "falcon h1 norm": ("falcon-h1", {"mamba_rms_norm": True}),
    "falcon h1 norm biases": ("falcon-h1", FALCON_BIASES | {"mamba_rms_norm": True}),
    "falcon h1 other heads": ("falcon-h1", {"head_dim": 32, "mamba_conv_bias": False}),
    "falcon h1 theta": ("falcon-h1", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e11}}),
}  # fmt: skip
SLOW = {
    "granite4 rope",
    "granite4 tied",
    "granite4 one expansion",
    "bamba several",
    "falcon h1 other heads",
    "falcon h1 theta",
}


@pytest.mark.parametrize(
    "name", [pytest.param(it, marks=pytest.mark.slow if it in SLOW else ()) for it in CASES]
)
def test_what_the_metadata_say_is_computed(tmp_path, name):
    arch, changes = CASES[name]
    file = tmp_path / "model.gguf"
    oracle = write(file, arch, "Q8_0", **changes)

    largest, is_same = difference(load(file), oracle)

    assert largest < TOLERANCE
    assert is_same


def test_gate_and_up_of_granite4_may_have_different_types(tmp_path):
    file = tmp_path / "model.gguf"
    kinds = {"attn_v": "Q6_K", "ffn_up": "Q8_0", "ffn_down": "Q6_K"}
    oracle = write(file, "granitehybrid", lambda name: kinds.get(name.split(".")[-2], "Q4_K"))

    largest, is_same = difference(load(file), oracle)

    assert largest < TOLERANCE
    assert is_same


def test_layers_and_multipliers_of_granite4_are_those_of_the_metadata(tmp_path):
    file = tmp_path / "model.gguf"
    write(file, "granitehybrid", "Q8_0")

    config = ModelConfig.from_folder(file)

    assert config.architecture == "GraniteMoeHybridForCausalLM"
    assert [type(it.mixer) for it in config.network.layers] == [Mamba2, Attention, Mamba2]
    attention = config.network.layers[1].mixer
    assert (attention.scale, attention.rotary) == (0.2, None)
    assert config.content["logits_scaling"] == 0.25


def test_layers_of_falcon_h1_have_both_mixers(tmp_path):
    file = tmp_path / "model.gguf"
    write(file, "falcon-h1", "Q8_0")

    config = ModelConfig.from_folder(file)

    assert config.architecture == "FalconH1ForCausalLM"
    assert {type(it.mixer) for it in config.network.layers} == {Parallel}
    assert config.network.layers[0].mixer.mixers[1].eps is None


def test_heads_of_granite4_rotate_where_the_metadata_do_not_say(tmp_path):
    """As in llama.cpp, which uses the key for nothing else."""
    file = tmp_path / "model.gguf"
    key = "granitehybrid.rope.scaling.finetuned"
    oracle = write(file, "granitehybrid", "Q8_0", {key: (None, BOOL)}, **ROPE)

    largest, is_same = difference(load(file), oracle)

    assert largest < TOLERANCE
    assert is_same


def test_multipliers_that_are_missing_or_0_change_nothing(tmp_path):
    file = tmp_path / "model.gguf"
    metadata = {
        "granitehybrid.attention.scale": (None, F32),
        "granitehybrid.embedding_scale": (0.0, F32),
        "granitehybrid.residual_scale": (None, F32),
        "granitehybrid.logit_scale": (0.0, F32),
    }
    none = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
    oracle = write(file, "granitehybrid", "Q8_0", metadata, **none, attention_multiplier=64**-0.5)

    largest, is_same = difference(load(file), oracle)

    assert largest < TOLERANCE
    assert is_same


@pytest.mark.parametrize(
    ("arch", "key", "value", "says"),
    [
        ("granitehybrid", "expert_count", (8, U32), "granitehybrid.expert_count = 8 is not supported: a mixture of"),
        ("granitehybrid", "ssm.time_step_rank", (7, U32), "ssm.inner_size = 512 must be a multiple of"),
        ("granitehybrid", "ssm.time_step_rank", (0, U32), "granitehybrid.ssm.time_step_rank = 0"),
        ("granitehybrid", "ssm.inner_size", (384, U32), "must be a multiple of granitehybrid.embedding_length = 256"),
        ("granitehybrid", "ssm.state_size", (None, U32), "ssm.state_size must be a whole number, which is missing"),
        ("granitehybrid", "ssm.group_count", (3, U32), "must be a multiple of mamba_n_groups = 3"),
        ("granitehybrid", "attention.head_count_kv", (2, U32), "head_count_kv must be an array, found 2"),
        ("granitehybrid", "rope.scaling.finetuned", (3, U32), "finetuned must be true or false, found 3"),
        ("granitehybrid", "embedding_length", (3, U32), "embedding_length = 3 is too small for 4 heads"),
        ("granitehybrid", "logit_scale", (float("nan"), F32), "logit_scale must be a number, found nan"),
        ("bamba", "rope.dimension_count", (16, U32), "attn_rotary_emb = 16"),
        ("bamba", "residual_scale", (0.5, F32), "granitehybrid.residual_scale = 0.5 is not supported"),
        ("granite", "rope.scaling.finetuned", (False, BOOL), "granite.rope.scaling.finetuned = False"),
        ("granite", "rope.dimension_count", (32, U32), "granite.rope.dimension_count = 32 is not supported"),
        ("falcon-h1", "ssm.has_mup", (True, BOOL), "falcon-h1.ssm.has_mup is not supported: the file is older"),
        ("falcon-h1", "mlp_gate_multiplier", (0.2, F32), "its weights lack the multipliers"),
        ("falcon-h1", "attention.scale", (0.25, F32), "falcon-h1.attention.scale = 0.25 is not supported"),
    ],
)  # fmt: skip
def test_what_is_not_supported_or_wrong_is_named(tmp_path, arch, key, value, says):
    file = tmp_path / "model.gguf"
    write(file, arch, metadata={f"{arch.replace('bamba', 'granitehybrid')}.{key}": value})

    with pytest.raises(ModelError) as raised:
        ModelConfig.from_folder(file)

    assert says in str(raised.value)
    assert str(raised.value).startswith(str(file))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nemotron_h", "its layers have either a mixer or an MLP"),
        ("nemotron_h_moe", "a mixture of experts"),
        ("granitemoe", "a mixture of experts"),
        ("mamba2", "networks without attention are not served"),
        ("jamba", "its recurrent layers are those of Mamba-1"),
        ("plamo2", "its Mamba layers have norms of their own"),
    ],
)
def test_an_architecture_that_is_not_supported_is_named_with_the_reason(tmp_path, name, why):
    file = tmp_path / "model.gguf"
    kind = gguf.GGUFValueType.STRING
    write_other(file, "llama", "Q8_0", {"general.architecture": (name, kind)})

    with pytest.raises(UnsupportedModelError) as raised:
        ModelConfig.from_folder(file)

    assert f"general.architecture = '{name}' is not supported in GGUF files: {why}" in str(
        raised.value
    )


def test_a_file_without_attention_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    key = "granitehybrid.attention.head_count_kv"
    write(file, "granitehybrid", metadata={key: ([0, 0, 0], ARRAY)})

    with pytest.raises(UnsupportedModelError, match="Mamba2 without attention is not supported"):
        ModelConfig.from_folder(file)


def test_layers_that_differ_from_the_metadata_are_an_error(tmp_path):
    file = tmp_path / "model.gguf"
    key = "granitehybrid.attention.head_count_kv"
    write(file, "granitehybrid", metadata={key: ([2, 0, 0], ARRAY)})

    with pytest.raises(WeightsError, match=r"missing: model\.layers\.0\.self_attn"):
        load(file)


@pytest.mark.parametrize("arch", [*HYBRIDS, "bamba"])
def test_every_key_of_a_file_has_an_effect(tmp_path, arch, caplog):
    file = tmp_path / "model.gguf"
    write(file, arch, "Q8_0")

    load_model(file, ModelConfig.from_folder(file), torch.float32, "cpu")

    assert "no effect" not in caplog.text


@pytest.mark.parametrize(
    ("arch", "pre", "adds_bos"),
    [("granitehybrid", "dbrx", False), ("falcon-h1", "falcon-h1", True)],
)
def test_their_tokenizers_are_read(tmp_path, arch, pre, adds_bos):
    file = tmp_path / "model.gguf"
    write(file, arch, "Q8_0", tokenizer=lambda writer: add_bytes(writer, pre=pre))

    tokenizer = Tokenizer.from_folder(file)

    ids = tokenizer.encode("Hello 12345", add_special_tokens=False)
    assert tokenizer.decode(ids) == "Hello 12345"
    assert tokenizer.encode("Hello 12345") == [1] * adds_bos + ids
