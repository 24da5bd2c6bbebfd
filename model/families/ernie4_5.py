"""ERNIE 4.5 (dense): Llama that rotates neighbouring pairs of dimensions."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import LLAMA
from model.network.spec import Attention, Dense, Layer, Network

_TENSORS: Final = dataclasses.replace(LLAMA, interleaved_rotary=True)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("compression_ratio", 1)
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=2, head_dim=128)
    bias, norm = keys.flag("use_bias"), parts.rms_norm(keys, 1e-5)
    rotary = read_rotary(keys, dim, theta=500_000.0)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias)
    layer = Layer(mixer, Dense(parts.inner_size(keys), parts.activation(keys), bias=bias), norm)
    layers = parts.with_windows(layer, parts.same_windows(keys))
    return parts.decoder(keys, layers, norm, tied=True)


FAMILY: Final = Family(
    "Ernie4_5ForCausalLM", "ernie4_5", network, _TENSORS, also=("Ernie4_5_ForCausalLM",)
)
