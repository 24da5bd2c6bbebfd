"""Ministral 3: Mistral with YaRN and a scale of queries by position."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Meta

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import POSITIONS, read_rotary, rope_parameters
from model.network.spec import Attention, Dense, Layer, Network, QueryScale

_BETA: Final = Meta(ge=0, le=100)
_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "max_position_embeddings": 262_144,
}


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=8, head_dim=128)
    norm = parts.rms_norm(keys, 1e-5)
    mixer = Attention(
        heads,
        kv_heads,
        dim,
        dim**-0.5,
        rotary=read_rotary(keys, dim, absent=_ROPE),
        query_scale=_query_scale(keys),
    )
    layer = Layer(mixer, Dense(parts.inner_size(keys), parts.activation(keys)), norm)
    windows = parts.same_windows(keys, keys.optional_integer("sliding_window", POSITIONS))
    return parts.decoder(keys, parts.with_windows(layer, windows), norm)


def _query_scale(keys: Keys) -> QueryScale | None:
    """Read the scale of queries.

    Source: transformers 5, `modeling_ministral3.py`, `get_llama_4_attn_scale`.
    """
    rope = rope_parameters(keys, _ROPE)
    beta = rope.optional_number("llama_4_scaling_beta", _BETA)
    context = keys.integer("max_position_embeddings", POSITIONS)
    original = rope.integer("original_max_position_embeddings", POSITIONS, context)
    return QueryScale(beta, original) if beta else None


FAMILY: Final = Family("Ministral3ForCausalLM", "ministral3", network, defaults=_DEFAULTS)
