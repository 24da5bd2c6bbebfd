"""Ministral 8B: Mistral with windows by layer."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import POSITIONS, read_rotary
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=8)
    norm = parts.rms_norm(keys)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=read_rotary(keys, dim))
    layer = Layer(mixer, Dense(parts.inner_size(keys), parts.activation(keys)), norm)
    window = keys.optional_integer("sliding_window", POSITIONS, 4096)
    has_window = [window is not None] * parts.num_layers(keys)
    windows = parts.stated_windows(keys, window, has_window)
    return parts.decoder(keys, parts.with_windows(layer, windows), norm)


FAMILY: Final = Family("MinistralForCausalLM", "ministral", network)
