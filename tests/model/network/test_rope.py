"""Rotations at positions far beyond the original context equal those of transformers, for every variant."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kernels import apply_rope
from model.checkpoint.config import ModelConfig
from model.checkpoint.parameter_parts import head_order
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import LLAMA
from model.network.rope import RotaryEmbedding, inverse_frequencies
from model.network.spec import Attention

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
    rope = RotaryEmbedding(*config.network.rotaries[0])
    rope.reserve(context, torch.float32, CPU)

    cos, sin = [table[positions] for table in rope.tables]

    assert config.max_context == context
    their_cos, their_sin = oracle(torch.empty(1, dtype=torch.float32), positions[None])
    their_sin[..., :64] *= -1  # the first half of our sines is negated, as the rotation needs it
    for ours, theirs in ((cos, their_cos), (sin, their_sin)):
        torch.testing.assert_close(ours[:, 0], theirs[0], rtol=0, atol=1e-6)


def yarn(original, **others):
    fields = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    return fields | others


# Where the ramp begins and ends, in pairs of dimensions, of which a head has 64.
RAMPS = {
    "within the pairs": (yarn(4096), 1e4),
    "ends beyond the last pair": (yarn(131072), 1e4),
    "ends beyond the last dimension": (yarn(131072, beta_fast=2000.0), 100.0),
    "begins beyond the last pair": (yarn(131072), 100.0),
    "begins and ends beyond the last dimension": (yarn(1_000_000), 10.0),
    "begins before the first pair": (yarn(128), 1e4),
    "begins and ends before the first pair": (yarn(4), 1e4),
    "has no length": (yarn(4096, beta_fast=4.0, beta_slow=4.0, truncate=False), 1e4),
    "has no length, at the last dimension": (yarn(1_000_000, beta_fast=2.0), 10.0),
    "begins and ends between pairs": (yarn(4096, truncate=False), 1e4),
    "of other rotations": (yarn(8192, beta_fast=20.0, beta_slow=3.0), 5e5),
    "of the defaults": (yarn(4096, beta_fast=0.0, beta_slow=0.0), 1e4),
    "with scales of its own": (yarn(4096, mscale=1.5, mscale_all_dim=0.7), 1e4),
    "with one scale, which has no effect": (yarn(4096, mscale=1.5), 1e4),
    "with an attention factor": (yarn(4096, attention_factor=1.3, mscale=1.5, mscale_all_dim=2.0), 1e4),
    "of a context that is not extended": (yarn(4096, factor=1.0), 1e4),
}  # fmt: skip


@pytest.mark.parametrize(("scaling", "theta"), RAMPS.values(), ids=RAMPS)
def test_a_yarn_ramp_may_begin_and_end_anywhere(scaling, theta):
    stated = scaling["original_max_position_embeddings"] * 4
    config, oracle = both(scaling, theta, stated)
    rotary, head_dim = config.network.rotaries[0]

    ours = inverse_frequencies(rotary, head_dim)

    torch.testing.assert_close(ours, oracle.inv_freq, rtol=1e-6, atol=0)
    assert rotary.attention_factor == pytest.approx(oracle.attention_scaling)


def test_a_longrope_service_within_the_original_context_has_the_short_factors(caplog):
    caplog.set_level("INFO")
    config, oracle = both(LONGROPE, 1e4, 131072)
    positions = torch.tensor([0, 5, ORIGINAL - 1])
    rope = RotaryEmbedding(*config.network.rotaries[0])
    rope.reserve(ORIGINAL, torch.float32, CPU)

    short = rope.tables[0][positions]
    assert not caplog.text
    rope.reserve(ORIGINAL + 1, torch.float32, CPU)
    long = rope.tables[0][positions]

    theirs, _ = oracle(torch.empty(1, dtype=torch.float32), positions[None])
    torch.testing.assert_close(short[:, 0], theirs[0], rtol=0, atol=1e-6)
    beyond = torch.tensor([[*positions, ORIGINAL]])
    theirs, _ = oracle(torch.empty(1, dtype=torch.float32), beyond)
    torch.testing.assert_close(long[:, 0], theirs[0, :-1], rtol=0, atol=1e-6)
    assert not torch.equal(short, long)
    assert f"--max-model-len {ORIGINAL} selects those for short texts" in caplog.text


PARTIAL = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama 3.1": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": LONGROPE | {
        "original_max_position_embeddings": 128, "short_factor": [1.0 + 0.1 * i for i in range(12)],
        "long_factor": [1.0 + 0.4 * i for i in range(12)],
    },
}  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("scaling", PARTIAL.values(), ids=PARTIAL)
def test_scores_of_heads_that_rotate_in_part_are_those_of_their_definition(scaling, interleaved):
    """The definition in float64: the first 24 of 32 dimensions rotate, in pairs of either layout; the others do not."""
    dim, dims, count = 32, 24, 200
    keys = Keys(
        {"max_position_embeddings": 512, "rope_scaling": {"partial_rotary_factor": 0.75} | scaling}
    )
    rotary = read_rotary(keys, dim, partial=1.0)
    assert rotary.dims == dims
    mixer = Attention(1, 1, dim, 1.0, rotary=rotary)
    order = head_order(mixer, dataclasses.replace(LLAMA, interleaved_rotary=interleaved))
    rope = RotaryEmbedding(rotary, dim)
    rope.reserve(count, torch.float64, CPU)
    queries, keys = torch.randn(2, count, 1, dim, dtype=torch.float64)

    ours = [apply_rope(x[..., list(order)], *rope.tables)[:, 0] for x in (queries, keys)]

    whole = RotaryEmbedding(dataclasses.replace(rotary, dims=None), dims)
    whole.reserve(count, torch.float64, CPU)
    cos, sin = (table[:, 0, dims // 2 :] for table in whole.tables)
    theirs = []
    for x in (queries[:, 0], keys[:, 0]):
        first, second = (x[:, 0:dims:2], x[:, 1:dims:2]) if interleaved else x[:, :dims].chunk(2, 1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        theirs.append(torch.cat((*rotated, x[:, dims:]), 1))
    torch.testing.assert_close(ours[0] @ ours[1].T, theirs[0] @ theirs[1].T, rtol=0, atol=1e-12)


def test_training_on_a_longrope_model_uses_the_factors_for_the_length():
    config, oracle = both(LONGROPE | {"original_max_position_embeddings": 16}, 1e4, 64)
    rope = RotaryEmbedding(*config.network.rotaries[0])
    for length in (16, 17):
        positions = torch.arange(length)

        ours, _ = rope.dense(positions, torch.float32)

        theirs, _ = oracle(torch.empty(1, dtype=torch.float32), positions[None])
        torch.testing.assert_close(ours[:, 0], theirs[0], rtol=0, atol=1e-6)
