"""Writes a configuration as `config.json` holds it; the inverse of `model.checkpoint.config_reader`.

Knows no tensors.
"""

from __future__ import annotations

from typing import Any

from model.checkpoint.config import ModelConfig, RopeConfig
from model.checkpoint.config_reader import FAMILIES


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """Write the configuration in the classic form of `config.json`, which all versions read."""
    family = FAMILIES[config.architecture]
    values: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_to_dict(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "initializer_range": config.initializer_range,
        "torch_dtype": config.dtype,
    }
    if family.qkv_bias is None:
        values["attention_bias"] = config.attention_bias
    if family.has_mlp_bias:
        values["mlp_bias"] = config.mlp_bias
    if family.model_type != "llama":
        values["sliding_window"] = config.sliding_window
    if family.slides_by_layer:
        values["use_sliding_window"] = config.sliding_window is not None
        values["layer_types"] = list(config.layer_types)
    return values


def _rope_to_dict(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.rope_type == "default":
        return None
    values: dict[str, Any] = {"rope_type": rope.rope_type, "factor": rope.factor}
    if rope.rope_type in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_max_positions
    if rope.rope_type == "llama3":
        values |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.rope_type == "yarn":
        values |= {
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
    return values
