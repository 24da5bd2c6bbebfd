"""Cwm: Llama with windows in three of four layers."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import POSITIONS, read_rotary
from model.network.spec import Attention, Dense, Layer, Network

_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("attention_bias", False)
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=8, head_dim=128)
    norm = parts.rms_norm(keys, 1e-5)
    rotary = read_rotary(keys, dim, theta=1_000_000.0, absent=_ROPE)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary)
    mlp = Dense(parts.inner_size(keys), parts.activation(keys), bias=keys.flag("mlp_bias"))
    window = keys.optional_integer("sliding_window", POSITIONS, 8192)
    has_window = [window is not None and layer % 4 > 0 for layer in range(parts.num_layers(keys))]
    windows = parts.stated_windows(keys, window, has_window)
    return parts.decoder(keys, parts.with_windows(Layer(mixer, mlp, norm), windows), norm)


FAMILY: Final = Family("CwmForCausalLM", "cwm", network)
