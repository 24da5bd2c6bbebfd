"""StarCoder2 3B and 7B: layer norms, biases, GELU without a gate, rotary embedding, sliding window."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import POSITIONS, read_rotary
from model.families.tensors import LLAMA
from model.network.spec import Attention, Dense, Layer, Network

_TENSORS: Final = dataclasses.replace(
    LLAMA, layer_modules={**LLAMA.layer_modules, "up": "mlp.c_fc", "down": "mlp.c_proj"}
)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=2)
    bias, norm = keys.flag("use_bias", default=True), parts.layer_norm(keys)
    rotary = read_rotary(keys, dim)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias)
    activation = parts.activation(keys, parts.GELUS)
    mlp = Dense(parts.inner_size(keys), activation, gated=False, bias=bias)
    windows = parts.same_windows(keys, keys.optional_integer("sliding_window", POSITIONS))
    layers = parts.with_windows(Layer(mixer, mlp, norm), windows)
    return parts.decoder(keys, layers, norm, tied=True)


FAMILY: Final = Family(
    "Starcoder2ForCausalLM",
    "starcoder2",
    network,
    _TENSORS,
    renamed={"layer_norm_eps": "norm_epsilon"},
)
