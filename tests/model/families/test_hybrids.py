"""Families with recurrent layers: what their files state, how they are stored, and what is refused."""

import dataclasses
import math

import pytest
import torch

from kernels.arch import CATALOGUE
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.errors import ModelFolderError, UnsupportedModelError
from model.executors.layers.limits import nondeterministic
from model.families.table import FAMILIES
from model.network.mixers import GatedDelta, Mamba2, Parallel, ShortConv
from model.network.spec import Attention
from tests.model.checkpoint import format_samples
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.model.executors.paged import logits_in_chunks
from tests.model.families.checkpoints import (
    add_tensors,
    expected_logits,
    load,
    logits,
)

HYBRIDS = ["qwen3.5", "lfm2", "granite4", "falcon h1", "bamba"]
TOKENS = [(7 * i) % 120 + 2 for i in range(80)]


def read(name, **changes):
    return ModelConfig.from_dict(CASES[name].content | changes).network


def kinds(network):
    return [type(layer.mixer) for layer in network.layers]


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_config_json_of_a_saved_model_states_the_same_network(name):
    config = ModelConfig.from_dict(CASES[name].content)

    assert ModelConfig.from_dict(config.to_dict()) == config


def test_every_fourth_layer_of_qwen3_5_has_attention_unless_the_file_lists_others():
    absent = {"layer_types": None}

    assert kinds(read("qwen3.5", **absent)) == [GatedDelta] * 3 + [Attention]
    assert kinds(read("qwen3.5", full_attention_interval=2, **absent)) == [
        GatedDelta, Attention, GatedDelta, Attention,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key", "others"),
    [("bamba", "attn_layer_indices", {}), ("lfm2", "full_attn_idxs", {"layer_types": None})],
)
def test_indices_of_no_layer_are_noted(name, key, others):
    config = ModelConfig.from_dict(CASES[name].content | others | {key: [1, 99]})

    assert kinds(config.network).count(Attention) == 1
    count = len(config.network.layers)
    assert any(f"{key} has [99], beside the {count} layers" in it for it in config.notes)


def test_attention_of_qwen3_5_has_a_gate_and_rotates_a_quarter_of_each_head():
    attention = read("qwen3.5").layers[3].mixer

    assert attention.gate
    assert attention.rotary.dims == 4
    assert not read("qwen3.5", attn_output_gate=False).layers[3].mixer.gate


def test_tensors_of_the_head_that_proposes_tokens_are_ignored(tmp_path):
    oracle = CASES["qwen3.5"].save(tmp_path)
    proposing = {
        f"mtp.layers.0.{name}.weight": torch.zeros(64, 64)
        for name in ("self_attn.k_proj", "mlp.up_proj")
    }
    add_tensors(tmp_path, proposing | {"mtp.norm.weight": torch.zeros(64)})

    found, expected = logits(tmp_path), expected_logits(oracle)

    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("keys", "inner"),
    [
        ({}, 8192),
        ({"block_ffn_dim_multiplier": None}, 8192),
        ({"block_ffn_dim_multiplier": 1.3}, 10_752),
        ({"block_auto_adjust_ff_dim": False}, 12_288),
        ({"block_ff_dim": 6656}, 4608),
    ],
)
def test_the_mlp_of_lfm2_has_two_thirds_of_the_stated_size(keys, inner):
    stated = {
        "intermediate_size": 12_288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    }

    assert read("lfm2", **stated | keys).layers[0].mlp.inner == inner


def test_the_first_files_of_lfm2_list_the_layers_with_attention_and_say_tie_embedding():
    absent = {"layer_types": None, "tie_word_embeddings": None}
    found = read("lfm2", full_attn_idxs=[0, 2], tie_embedding=False, **absent)

    assert kinds(found) == [Attention, ShortConv, Attention, ShortConv]
    assert not found.tied
    assert read("lfm2", **absent).tied
    assert kinds(read("lfm2", layer_types=None, full_attn_idxs=None)) == [Attention] * 4


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_gpu_has_deterministic_steps_only_where_our_kernels_compute_the_mixers(name):
    network, arch = read(name), CATALOGUE["h100"]
    wide = dataclasses.replace(
        network,
        layers=tuple(dataclasses.replace(it, mixer=widened(it.mixer)) for it in network.layers),
    )

    assert nondeterministic(network, "bfloat16", arch) == ()
    (reason,) = nondeterministic(wide, "bfloat16", arch)
    assert "torch_recurrent is not batch invariant" in reason
    assert "convolutions of 2 to 8 tokens, not 9" in reason


def widened(mixer):
    """Return a mixer whose convolution is wider than our kernels for GPUs can compute."""
    if isinstance(mixer, Parallel):
        return dataclasses.replace(mixer, mixers=tuple(map(widened, mixer.mixers)))
    return mixer if isinstance(mixer, Attention) else dataclasses.replace(mixer, width=9)


def test_layers_of_granite4_rotate_where_the_file_says_so():
    def rotary(**keys):
        return read("granite4", **keys).layers[1].mixer.rotary

    assert rotary() is None
    assert rotary(position_embedding_type="nope") is None
    assert rotary(position_embedding_type="rope") is not None


def test_multipliers_of_granite4_are_not_in_the_norm_of_mamba2():
    layer = read("granite4").layers[0]

    assert layer.mixer.eps == 1e-6
    assert layer.norm.eps == 1e-6 / 12.0**2


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        (None, (0.0, math.inf)),
        ([0.001, 0.1], (0.001, 0.1)),
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
    ],
)
def test_limits_of_step_sizes_may_be_infinite(stated, found):
    assert read("granite4", time_step_limit=stated).layers[0].mixer.dt_limits == found


def test_each_layer_of_falcon_h1_has_attention_beside_mamba2():
    for layer in read("falcon h1").layers:
        assert type(layer.mixer) is Parallel
        assert [*map(type, layer.mixers)] == [Attention, Mamba2]


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "qwen3.5",
            {"linear_num_value_heads": 3},
            "linear_num_value_heads = 3 must be a multiple of",
        ),
        (
            "qwen3.5",
            {"linear_conv_kernel_dim": 1},
            "linear_conv_kernel_dim must be a whole number >= 2",
        ),
        (
            "granite4",
            {"mamba_n_heads": 7},
            "mamba_n_heads = 7 of mamba_d_head = 16 elements must have 128",
        ),
        (
            "granite4",
            {"mamba_n_groups": 3},
            "mamba_n_heads = 8 must be a multiple of mamba_n_groups = 3",
        ),
        ("granite4", {"mamba_d_head": "16"}, "mamba_d_head must be a whole number or 'auto'"),
        ("granite4", {"time_step_limit": [0.5]}, "time_step_limit must be"),
        ("granite4", {"time_step_limit": [0.5, 0.1]}, "a smaller and a larger number"),
        (
            "falcon h1",
            {"ssm_multipliers": [1.0] * 4},
            "ssm_multipliers must have 5 numbers, found 4",
        ),
        ("falcon h1", {"mlp_multipliers": [1.0, 0.0]}, r"mlp_multipliers\[1\] must be a number"),
        ("lfm2", {"layer_types": ["conv"]}, "layer_types must be a list of num_hidden_layers = 4"),
    ],
)
def test_values_that_do_not_fit_are_named_with_their_limits(name, keys, message):
    with pytest.raises(ModelFolderError, match=message):
        read(name, **keys)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "granite4",
            {"num_local_experts": 64},
            "num_local_experts = 64 is not supported: a mixture of experts",
        ),
        ("granite4", {"num_local_experts": None}, "num_local_experts = 8 is not supported"),
        ("qwen3.5", {"num_experts": 8}, "num_experts = 8 is not supported"),
        (
            "qwen3.5",
            {"layer_types": ["conv"] * 4},
            "supported are full_attention, linear_attention",
        ),
        ("lfm2", {"layer_types": ["mamba"] * 4}, "supported are full_attention, conv"),
        ("lfm2", {"conv_dim": 32}, "conv_dim = 32 is not supported"),
        ("falcon h1", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("bamba", {"attn_layer_indices": None}, "a network of Mamba2 without attention is not"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "a network of ShortConv without attention is not"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, keys, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(name, **keys)


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
        ("Lfm2MoeForCausalLM", "lfm2_moe"),
        ("Qwen3NextForCausalLM", "qwen3_next"),
    ],
)
def test_mixtures_of_experts_are_other_architectures(architecture, model_type):
    with pytest.raises(UnsupportedModelError, match=f"architecture '{architecture}' is not supp"):
        ModelConfig.from_dict({"architectures": [architecture], "model_type": model_type})


def test_parameters_of_the_decay_are_float32_in_every_model(tmp_path):
    oracle = CASES["qwen3.5"].save(tmp_path)

    config = ModelConfig.from_folder(tmp_path)
    model = load_model(tmp_path, config, torch.bfloat16, "cpu", pack=False)

    layer, stored = model.decoder_layers[0], oracle.model.layers[0].linear_attn
    assert torch.equal(layer.a_log, stored.A_log)
    assert torch.equal(layer.dt_bias, stored.dt_bias)
    assert layer.conv.dtype is layer.gated_norm.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["qwen3.5", "falcon h1"])
def test_quantized_matrices_are_held_as_stored_beside_small_ones_of_full_numbers(tmp_path, name):
    case = CASES[name]
    if name == "qwen3.5":  # so that blocks of 16 are those of a head
        case = dataclasses.replace(case, changes=case.changes | {"linear_value_head_dim": 16})
    case.save(tmp_path / "it")
    described = format_samples.HF_FP8 | {"fmt": "e4m3", "weight_block_size": [16, 16]}
    exact = format_samples.store(
        tmp_path / "it",
        format_samples.blocks(16),
        "weight_scale_inv",
        described,
        keep=("lm_head", "in_proj_a", "in_proj_b"),
    )
    config = ModelConfig.from_folder(tmp_path / "it")
    held = load_model(
        tmp_path / "it", config, torch.float32, "cpu", weight_format=config.weight_format
    )
    layer = load_model(
        tmp_path / "it",
        config,
        torch.float32,
        "cpu",
        weight_format=config.weight_format,
        pack=False,
    ).decoder_layers[-1]

    assert {it.format.bits for it in layer.matrices.values()} == {8}
    found, expected = (logits_in_chunks(it, TOKENS, 17) for it in (held, load(exact)))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", HYBRIDS)
def test_random_weights_give_finite_logits_that_depend_on_the_first_token(name, tmp_path):
    CASES[name].save(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    model = load_model(tmp_path, config, torch.float32, "cpu", "dummy")

    found, other = (logits_in_chunks(model, [it, *TOKENS], 30)[-1] for it in (3, 4))

    assert bool(found.isfinite().all())
    assert not torch.equal(found, other)


def test_every_family_with_recurrent_layers_is_compared():
    served = {CASES[name].served for name in HYBRIDS}

    assert served == {
        "Qwen3_5ForCausalLM",
        "Lfm2ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "FalconH1ForCausalLM",
        "BambaForCausalLM",
    }
    assert served <= FAMILIES.keys()
