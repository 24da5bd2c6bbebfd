"""Bamba: Mamba-2, and attention whose heads rotate in part in a few layers."""

from __future__ import annotations

from typing import Final

from model.families import falcon_h1, parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.mamba2 import read_mamba2
from model.families.rotary import read_rotary
from model.network.spec import Attention, Dense, Layer, Network

_ROTATING: Final = 0.5


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=8)
    keys.require("attn_rotary_emb", int(_ROTATING * dim))
    bias = keys.flag("attention_bias")
    rotary = read_rotary(keys, dim, partial=_ROTATING)
    attention = Attention(
        heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias
    )
    norm = parts.rms_norm(keys, 1e-5)
    mamba2 = read_mamba2(keys, norm.eps)
    mlp = Dense(parts.inner_size(keys), parts.activation(keys), bias=keys.flag("mlp_bias"))
    with_attention = parts.layer_indices(keys, "attn_layer_indices") or ()
    layers = tuple(
        Layer(attention if index in with_attention else mamba2, mlp, norm)
        for index in range(parts.num_layers(keys))
    )
    return parts.decoder(keys, layers, norm)


FAMILY: Final = Family(
    "BambaForCausalLM",
    "bamba",
    network,
    falcon_h1.TENSORS,
    defaults={"max_position_embeddings": 262_144},
)
