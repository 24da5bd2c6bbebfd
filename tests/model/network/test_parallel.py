"""A model shared by several ranks computes what the whole model computes."""

from __future__ import annotations

import pytest
import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model, load_part
from tests.model.executors.paged import PagedDriver
from tests.model.network.ranks import ThreadRanks
from tests.tiny_checkpoint import write_tiny_checkpoint

FAMILIES = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "untied, odd vocabulary": {"num_key_value_heads": 4, "vocab_size": 263},
    "tied, odd vocabulary": {
        "num_key_value_heads": 4, "vocab_size": 263, "tie_word_embeddings": True,
    },
    "biases": {
        "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 4,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8, "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": 4,
        "num_key_value_heads": 4, "global_head_dim": 32, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8, "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "opt": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 96, "activation_function": "relu",
        "word_embed_proj_dim": 64, "do_layer_norm_before": True, "num_key_value_heads": 4,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4,
        "n_positions": 64, "activation_function": "gelu_new",
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_key_value_heads": 4, "sliding_window": 5,
        "partial_rotary_factor": 0.75,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_key_value_heads": 4,
        "no_rope_layer_interval": 2,
    },
    "stablelm": {
        "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "num_key_value_heads": 4,
        "use_qkv_bias": True,
    },
    "gpt_neox": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox",
    },
    "gptj, odd vocabulary": {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4,
        "n_positions": 64, "rotary_dim": 8, "activation_function": "gelu_new", "vocab_size": 263,
    },
    "cohere": {
        "architectures": ["CohereForCausalLM"], "model_type": "cohere", "num_key_value_heads": 4,
        "use_qk_norm": True,
    },
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "num_key_value_heads": 4,
        "sliding_window": 5, "sliding_window_pattern": 2,
    },
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 3},
    },
    "hunyuan": {
        "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "num_key_value_heads": 4,
    },
    "apertus": {
        "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "num_key_value_heads": 4,
        "hidden_act": "xielu",
    },
    "nemotron": {
        "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "num_key_value_heads": 4,
        "hidden_act": "relu2", "mlp_bias": True,
    },
    "helium": {"architectures": ["HeliumForCausalLM"], "model_type": "helium", "num_key_value_heads": 4},
}  # fmt: skip
PROMPTS = [{"a": [1, 2, 3, 4, 5, 6, 7, 8, 9], "b": [5]}, {"a": [3], "b": [7]}, {"c": [9, 8, 7]}]


def write(folder, family):
    return write_tiny_checkpoint(folder, **FAMILIES[family])


def drive(model):
    driver = PagedDriver(model)
    return [driver.step(chunks) for chunks in PROMPTS]


def packed(folder, config, communicator, load_format="auto"):
    model = load_part(folder, config, torch.float32, "cpu", load_format, communicator=communicator)
    model.optimize()
    return model


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_the_logits_of_the_whole_model(tmp_path, family, size):
    folder = write(tmp_path, family)
    config = ModelConfig.from_folder(folder)
    assert not config.parallel_unsupported(size)
    whole = drive(load_model(folder, config, torch.float32, "cpu"))

    def compute(communicator):
        return drive(packed(folder, config, communicator))

    shared = ThreadRanks(size).run(compute)

    for step, expected in enumerate(whole):
        for name, logits in expected.items():
            found = [rank[step][name] for rank in shared]
            assert all(torch.equal(it, found[0]) for it in found)
            torch.testing.assert_close(found[0], logits, rtol=2e-4, atol=2e-4)


def test_dummy_weights_are_those_of_the_whole_model(tmp_path):
    config = ModelConfig.from_folder(write(tmp_path, "qwen3"))
    whole = drive(load_model(tmp_path, config, torch.float32, "cpu", "dummy"))

    def compute(communicator):
        return drive(packed(tmp_path, config, communicator, "dummy"))

    for found in ThreadRanks(2).run(compute):
        torch.testing.assert_close(found[0]["a"], whole[0]["a"], rtol=2e-4, atol=2e-4)


def test_each_rank_holds_its_part_of_the_matrices(tmp_path):
    folder = write(tmp_path, "llama")
    config = ModelConfig.from_folder(folder)

    def sizes(communicator):
        model = load_part(folder, config, torch.float32, "cpu", communicator=communicator)
        return {name: it.numel() for name, it in model.named_parameters() if it.ndim > 1}

    (whole,) = ThreadRanks(1).run(sizes)
    for rank in ThreadRanks(4).run(sizes):
        shares = {name: count / whole[name] for name, count in rank.items()}
        assert shares.pop("embed_tokens") == 1
        assert set(shares.values()) == {0.25}


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 3, "3 is no divisor of its 2 key-value heads"),
        ({"num_key_value_heads": 4, "intermediate_size": 94}, 4, "94 columns of the MLP"),
        (
            {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_key_value_heads": 4},
            2, "its norms of queries and keys are of all heads",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_named(tmp_path, changes, size, words):
    config = ModelConfig.from_folder(write_tiny_checkpoint(tmp_path, **changes))

    assert words in "; ".join(config.parallel_unsupported(size))
    assert not config.parallel_unsupported(1)
