"""Rotations at positions far beyond the original context equal those of transformers, for every variant."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model.checkpoint.config import ModelConfig
from model.network.rope import RotaryEmbedding

CPU = torch.device("cpu")
ORIGINAL = 4096
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.002 * i for i in range(64)],
    "long_factor": [1.0 + 0.4 * i for i in range(64)],
}
# Rope parameters of released models, with the context that config.json states and what it allows.
CASES = {
    "qwen3, yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        1e6, 40960, 131072,
    ),
    "qwen2.5, yarn in the oldest form": (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        1e6, 32768, 131072,
    ),
    "yarn of the extended context": (
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        1e4, 131072, 131072,
    ),
    "llama 3.1": (
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        5e5, 131072, 131072,
    ),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 1e5, 16384, 16384),
    "longrope": (LONGROPE, 1e4, 131072, 131072),
    "longrope with its factors": (
        LONGROPE | {"factor": 16.0, "attention_factor": 1.19}, 1e4, 131072, 131072,
    ),
}  # fmt: skip


def both(scaling, theta, stated):
    """Return our configuration and transformers' module for a model with heads of 128."""
    common = {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": stated,
    }
    oracle = LlamaConfig(**common, rope_parameters={**scaling, "rope_theta": theta})
    ours = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    return ModelConfig.from_dict(common | ours), LlamaRotaryEmbedding(oracle)


@pytest.mark.parametrize(("scaling", "theta", "stated", "context"), CASES.values(), ids=CASES)
def test_rotations_up_to_the_end_of_the_context_are_those_of_transformers(
    scaling, theta, stated, context
):
    config, oracle = both(scaling, theta, stated)
    positions = torch.tensor([0, 1, 4095, 4096, 9000, context // 2, context - 2, context - 1])
    rope = RotaryEmbedding(config.rope, config.head_dim)
    rope.reserve(context, torch.float32, CPU)

    cos, sin = [table[positions] for table in rope.tables]

    assert config.max_context == context
    their_cos, their_sin = oracle(torch.empty(1, dtype=torch.float32), positions[None])
    their_sin[..., :64] *= -1  # the first half of our sines is negated, as the rotation needs it
    for ours, theirs in ((cos, their_cos), (sin, their_sin)):
        torch.testing.assert_close(ours[:, 0], theirs[0], rtol=0, atol=1e-6)


def test_a_longrope_service_within_the_original_context_has_the_short_factors():
    config, oracle = both(LONGROPE, 1e4, 131072)
    positions = torch.tensor([0, 5, ORIGINAL - 1])
    rope = RotaryEmbedding(config.rope, config.head_dim)
    rope.reserve(ORIGINAL, torch.float32, CPU)

    short = rope.tables[0][positions]
    rope.reserve(ORIGINAL + 1, torch.float32, CPU)
    long = rope.tables[0][positions]

    theirs, _ = oracle(torch.empty(1, dtype=torch.float32), positions[None])
    torch.testing.assert_close(short[:, 0], theirs[0], rtol=0, atol=1e-6)
    beyond = torch.tensor([[*positions, ORIGINAL]])
    theirs, _ = oracle(torch.empty(1, dtype=torch.float32), beyond)
    torch.testing.assert_close(long[:, 0], theirs[0, :-1], rtol=0, atol=1e-6)
    assert not torch.equal(short, long)


def test_training_on_a_longrope_model_uses_the_factors_for_the_length():
    config, oracle = both(LONGROPE | {"original_max_position_embeddings": 16}, 1e4, 64)
    rope = RotaryEmbedding(config.rope, config.head_dim)
    for length in (16, 17):
        positions = torch.arange(length)

        ours, _ = rope.dense(positions, torch.float32)

        theirs, _ = oracle(torch.empty(1, dtype=torch.float32), positions[None])
        torch.testing.assert_close(ours[:, 0], theirs[0], rtol=0, atol=1e-6)
