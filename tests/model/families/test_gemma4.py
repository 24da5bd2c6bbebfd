"""Gemma 4 and 3n: what their config.json states of each layer, what is refused, and tensors that no layer reads."""

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.weight_format import unquantized
from model.checkpoint.config import ModelConfig
from model.errors import ModelFolderError, UnsupportedModelError
from model.executors import cpu_library, single_launch
from model.executors.columns import Bucket
from model.executors.executor import ModelProblem
from model.executors.layers import executor
from model.network.spec import Rotary
from model.network.state import Paged, Shared
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE
from tests.model.families.checkpoints import (
    add_tensors,
    edit_config,
    expected_logits,
    load,
    logits,
)
from tests.model.families.test_files import read

NANO = ["gemma-4-E2B", "gemma-4-E4B", "gemma-3n-E2B", "gemma-3n-E4B"]


def kinds(network):
    return [mixer.window is None for mixer in network.attentions]


@pytest.mark.parametrize("name", NANO)
def test_the_last_layers_read_the_last_keys_and_values_of_their_type_before_them(name):
    network = read(name).network
    is_full, shared = kinds(network), [it.kv_layer for it in network.attentions]
    first = next(index for index, it in enumerate(shared) if it is not None)

    assert shared[:first] == [None] * first
    for index in range(first, len(shared)):
        same = [at for at in range(first) if is_full[at] == is_full[index]]
        assert shared[index] == same[-1]
    state = network.state("bfloat16")
    assert [type(it) for it in state.layers] == [Paged] * first + [Shared] * (len(shared) - first)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    # Of 15, 24, 20 and 20 layers that compute keys and values, and of 60.
    [
        ("gemma-4-E2B", 12 * 1024 + 3 * 2048),
        ("gemma-4-E4B", 20 * 2048 + 4 * 4096),
        ("gemma-3n-E2B", 20 * 2048),
        ("gemma-3n-E4B", 20 * 2048),
        ("gemma-4-31B", 50 * 16_384 + 10 * 8192),
    ],
)
def test_a_token_takes_the_bytes_of_the_layers_with_keys_of_their_own(name, num_bytes):
    assert read(name).network.state("bfloat16").token_bytes == num_bytes


def test_layers_that_attend_to_all_tokens_have_larger_heads_of_which_a_quarter_rotates():
    network = read("gemma-4-E2B").network

    assert kinds(network) == [False, False, False, False, True] * 7
    assert {(it.window, it.head_dim, it.num_kv_heads, it.rotary) for it in network.attentions} == {
        (512, 256, 1, Rotary(theta=10_000.0)),
        (None, 512, 1, Rotary("proportional", 1_000_000.0, pairs=64)),
    }
    assert [layer.mlp.inner for layer in network.layers] == [6144] * 15 + [12_288] * 20
    assert network.per_layer is not None
    assert (network.per_layer.vocab, network.per_layer.size) == (262_144, 256)


def test_values_of_large_sizes_are_their_keys_in_layers_that_attend_to_all_tokens():
    network = read("gemma-4-31B").network

    assert {(it.window, it.num_kv_heads, it.tied_values) for it in network.attentions} == {
        (1024, 16, False),
        (None, 4, True),
    }
    assert network.per_layer is None


def test_the_first_ten_layers_of_gemma_3n_are_sparse_unless_the_file_states_others():
    for name, count in (("gemma-3n-E2B", 30), ("gemma-3n-E4B", 35)):
        found = [layer.mlp.sparsity for layer in read(name).network.layers]
        assert found == [0.95] * 10 + [0.0] * (count - 10)
    stated = read("gemma-3n-E4B", activation_sparsity_pattern=0.5).network
    assert {layer.mlp.sparsity for layer in stated.layers} == {0.5}


def test_sizes_of_layers_are_read_from_both_forms_of_the_file():
    classic = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    config = CASES["gemma4 large"].config().to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    assert "global_head_dim" not in config
    new = ModelConfig.from_dict(config).network
    old = {key: it for key, it in config.items() if key != "per_layer_config"} | classic
    old |= {"global_head_dim": 24}

    assert ModelConfig.from_dict(old).network == new


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma-4-E2B", {"enable_moe_block": True}, "enable_moe_block = True"),
        ("gemma-4-E2B", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma-4-E2B", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ("gemma-4-E2B", {"per_layer_config": {"4": {"scale": 2}}}, "per_layer_config.4.scale = 2"),
        ("gemma-4-E2B", {"layer_types": ["chunked_attention"] * 35}, "'chunked_attention'"),
        ("gemma-3n-E2B", {"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input = 0"),
    ],
)
def test_an_unsupported_variant_is_rejected_with_its_key(name, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma-4-E2B", {"num_kv_shared_layers": 35}, "num_kv_shared_layers = 35 of 35 layers"),
        ("gemma-4-E2B", {"num_kv_shared_layers": 32}, "no layer of type full_attention"),
        ("gemma-4-E2B", {"global_head_dim": 33}, "head_dim must be an even number"),
        (
            "gemma-4-E2B",
            {"per_layer_config": {"13": {"head_dim": 64}}},
            r"per_layer_config: layer 15 has .* but reads those of layer 13, \(1, 64\)",
        ),
        ("gemma-3n-E2B", {"intermediate_size": [1, 2]}, "a number for each of 30 layers, found 2"),
        ("gemma-3n-E2B", {"activation_sparsity_pattern": 1.0}, "activation_sparsity_pattern must"),
        ("gemma-3n-E2B", {"altup_active_idx": 4}, "altup_active_idx = 4 must be less than"),
    ],
)
def test_the_error_for_an_invalid_value_names_the_key(name, changes, message):
    with pytest.raises(ModelFolderError, match=message):
        read(name, **changes)


@pytest.mark.parametrize("case", ["gemma4", "gemma3n"])
def test_stored_keys_of_layers_that_read_others_are_ignored(case, tmp_path):
    oracle = CASES[case].save(tmp_path)
    network = ModelConfig.from_folder(tmp_path).network
    unread = {
        f"model.layers.{index}.self_attn.{name}.weight": torch.ones(32, 64)
        for index, mixer in enumerate(network.attentions)
        if mixer.kv_layer is not None
        for name in ("k_proj", "v_proj", "k_norm")
    }
    assert unread
    add_tensors(tmp_path, unread)

    found, expected = logits(tmp_path), expected_logits(oracle)

    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_the_language_model_of_a_multimodal_gemma_3n_is_that_of_the_text_model(prefix, tmp_path):
    oracle = CASES["gemma3n"].save(tmp_path)
    edit_config(
        tmp_path,
        lambda config: {
            "architectures": ["Gemma3nForConditionalGeneration"],
            "model_type": "gemma3n",
            "text_config": config,
        },
    )
    add_tensors(
        tmp_path,
        {
            f"model.{name}.weight": torch.ones(2, 3)
            for name in ("vision_tower.a", "audio_tower.b", "embed_vision.c", "embed_audio.d")
        },
    )

    found, expected = logits(tmp_path), expected_logits(oracle)

    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("case", "reasons"),
    [
        (
            "gemma4",
            ["no keys and values of an earlier layer", "no norms of values", "no per-layer inputs"],
        ),
        (
            "gemma4 large",
            ["no values from the key projection", "no scale of the stream after a layer"],
        ),
        ("gemma3n", ["no AltUp", "no LAuReL", "no sparse activations"]),
    ],
)
def test_the_fast_paths_refuse_the_parts_by_name(case, reasons):
    network = ModelConfig.from_dict(CASES[case].content).network
    problem = ModelProblem(network, "bfloat16", unquantized("bfloat16"), CATALOGUE["h100"])

    for refused in (single_launch.unsupported(problem), cpu_library.unsupported(network)):
        assert set(reasons) <= set(refused)


def test_only_several_streams_have_no_deterministic_steps():
    def refused(case, **changes):
        network = ModelConfig.from_dict(CASES[case].content).network
        problem = ModelProblem(network, "bfloat16", unquantized("bfloat16"), CATALOGUE["h100"])
        bucket = Bucket(rows=1, columns=1, num_logits=1, **changes)
        return executor.LAYERS.unsupported(problem, bucket)

    assert refused("gemma3n", deterministic=True) == ("no deterministic AltUp",)
    assert refused("gemma3n") == refused("gemma4", deterministic=True) == ()


def test_norms_of_values_without_norms_of_queries_and_keys_are_refused():
    network = ModelConfig.from_dict(CASES["gemma4 large"].content).network
    first = network.layers[0]
    mixer = dataclasses.replace(first.mixer, qk_norm=None)
    network = dataclasses.replace(network, layers=(dataclasses.replace(first, mixer=mixer),))
    problem = ModelProblem(network, "float32", unquantized("float32"), CATALOGUE["cpu"])

    assert executor.LAYERS.unsupported(problem, Bucket(rows=1, columns=1, num_logits=1)) == (
        "no norms of values without norms of queries and keys per head",
    )


@pytest.mark.parametrize(
    ("case", "part"),
    [("gemma4", "per-layer inputs"), ("gemma3n", "several residual streams")],
)
def test_several_ranks_are_refused_by_name(case, part):
    config = ModelConfig.from_dict(CASES[case].content)

    assert f"no tensor parallelism of {part}" in config.parallel_unsupported(2)
    assert ModelConfig.from_dict(CASES["gemma4 large"].content).parallel_unsupported(1) == ()


def test_tokens_beyond_the_table_of_per_layer_inputs_have_its_first_row(tmp_path):
    CASES["gemma3n"].save(tmp_path)
    model = load(tmp_path)
    bound = model.executors.layers.bound
    hidden = torch.randn(2, 64)

    assert model.network.per_layer.vocab < VOCAB_SIZE
    found = bound.table.of(torch.tensor([VOCAB_SIZE - 1, -2]), torch.tensor([5, 0]), hidden)

    assert torch.equal(found, bound.table.of(torch.tensor([0, 0]), None, hidden))
