"""Gemma 1 and CodeGemma: Llama with GELU gates, scaled embeddings and weights of norms that are stored less 1."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import gemma2, parts
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import LLAMA
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("use_bidirectional_attention", False)
    # Google's files name the exact function, but the models were trained with the approximation.
    keys.require("hidden_act", *parts.GELUS)
    keys.require("hidden_activation", "gelu_pytorch_tanh")
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=16, head_dim=256)
    bias, norm = keys.flag("attention_bias"), parts.rms_norm(keys, float32=True)
    rotary = read_rotary(keys, dim)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias)
    layer = Layer(mixer, Dense(parts.inner_size(keys), "gelu_tanh"), norm)
    return parts.decoder(
        keys,
        parts.with_windows(layer, parts.same_windows(keys)),
        norm,
        tied=True,
        embedding_factor=parts.hidden_size(keys) ** 0.5,
    )


FAMILY: Final = dataclasses.replace(
    gemma2.FAMILY,
    architecture="GemmaForCausalLM",
    model_type="gemma",
    network=network,
    tensors=LLAMA,
    renamed={},
)
