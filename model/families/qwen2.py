"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and windows by layer."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys, *, sections: bool = False) -> Network:
    """Return the network of a config.json; `sections` as for `read_rotary`."""
    heads, kv_heads, dim = parts.heads(keys)
    norm = parts.rms_norm(keys)
    rotary = read_rotary(keys, dim, sections=sections)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=True)
    layer = Layer(mixer, Dense(parts.inner_size(keys), parts.activation(keys)), norm)
    return parts.decoder(keys, parts.with_windows(layer, parts.windows_from_layer(keys)), norm)


FAMILY: Final = Family("Qwen2ForCausalLM", "qwen2", network)
