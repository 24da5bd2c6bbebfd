"""Defaults of settings that the operator does not set."""

import pytest
import torch

from model.checkpoint.config import ModelConfig
from server.engine.core.messages import EngineConfig
from server.engine.runner.startup import _limits

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)


@pytest.mark.parametrize(
    ("device", "sequences", "budget", "expected"),
    [
        ("cpu", None, None, (64, 512)),
        ("cuda", None, None, (256, 1024)),
        ("cpu", 1000, None, (1000, 1000)),
        ("cuda", None, 100, (100, 100)),
        ("cuda", None, 9000, (256, 9000)),
        ("cuda", 3, 7, (3, 7)),
    ],
)
def test_default_limits_depend_on_the_device(device, sequences, budget, expected):
    config = EngineConfig(
        model_path="", model_id="", max_num_seqs=sequences, max_num_batched_tokens=budget
    )

    limits = _limits(config, MODEL, torch.device(device))

    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == expected
