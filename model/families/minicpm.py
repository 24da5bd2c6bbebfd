"""MiniCPM 1, 2 and 4: Llama with multipliers, which loading folds into weights."""

from __future__ import annotations

import math
from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import Rewrite
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("sparse_config")
    heads, kv_heads, dim = parts.heads(keys)
    bias = keys.flag("attention_bias")
    rotary = read_rotary(keys, dim)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias)
    mlp = Dense(parts.inner_size(keys), parts.activation(keys))
    norm = _multipliers(keys).norm(parts.rms_norm(keys))
    layers = parts.with_windows(Layer(mixer, mlp, norm), parts.same_windows(keys))
    return parts.decoder(keys, layers, norm, tied=True)


def _rewrites(keys: Keys) -> dict[str, Rewrite]:
    return _multipliers(keys).rewrites()


def _multipliers(keys: Keys) -> parts.Multipliers:
    embedding, depth, base = (
        keys.number(key, parts.MULTIPLIER, 1.0)
        for key in ("scale_emb", "scale_depth", "dim_model_base")
    )
    residual = depth / math.sqrt(parts.num_layers(keys))
    return parts.Multipliers(embedding, residual, base / parts.hidden_size(keys))


FAMILY: Final = Family("MiniCPMForCausalLM", "minicpm", network, rewrites=_rewrites)
