"""Mistral 7B: Llama with a sliding window."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import POSITIONS, read_rotary
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys)
    norm = parts.rms_norm(keys)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=read_rotary(keys, dim))
    layer = Layer(mixer, Dense(parts.inner_size(keys), parts.activation(keys)), norm)
    windows = parts.same_windows(keys, keys.optional_integer("sliding_window", POSITIONS, 4096))
    return parts.decoder(keys, parts.with_windows(layer, windows), norm)


FAMILY: Final = Family("MistralForCausalLM", "mistral", network)
