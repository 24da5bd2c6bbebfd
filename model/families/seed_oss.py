"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=8, head_dim=128)
    norm = parts.rms_norm(keys)
    mixer = Attention(
        heads,
        kv_heads,
        dim,
        dim**-0.5,
        rotary=read_rotary(keys, dim),
        bias=keys.flag("attention_bias", default=True),
        output_bias=keys.flag("attention_out_bias"),
    )
    mlp = Dense(parts.inner_size(keys), parts.activation(keys), bias=keys.flag("mlp_bias"))
    windows = parts.same_windows(keys)
    return parts.decoder(keys, parts.with_windows(Layer(mixer, mlp, norm), windows), norm)


FAMILY: Final = Family("SeedOssForCausalLM", "seed_oss", network)
