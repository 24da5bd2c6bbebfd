"""Helium: Llama that rotates neighbouring pairs of dimensions."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import ernie4_5, parts
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=20, head_dim=128)
    norm = parts.rms_norm(keys, 1e-8)
    rotary = read_rotary(keys, dim, theta=100_000.0)
    mixer = Attention(
        heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=keys.flag("attention_bias")
    )
    mlp = Dense(parts.inner_size(keys), parts.activation(keys), bias=keys.flag("mlp_bias"))
    windows = parts.same_windows(keys)
    return parts.decoder(keys, parts.with_windows(Layer(mixer, mlp, norm), windows), norm)


FAMILY: Final = dataclasses.replace(
    ernie4_5.FAMILY,
    architecture="HeliumForCausalLM",
    model_type="helium",
    network=network,
    also=(),
)
