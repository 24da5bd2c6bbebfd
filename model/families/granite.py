"""Granite 3: Llama with multipliers, which loading folds into weights, so that its layers are Llama's."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import Rewrite
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys)
    bias = keys.flag("attention_bias")
    scale = keys.number("attention_multiplier", parts.MULTIPLIER, 1.0)
    rotary = read_rotary(keys, dim)
    mixer = Attention(heads, kv_heads, dim, scale, rotary=rotary, bias=bias, output_bias=bias)
    mlp = Dense(parts.inner_size(keys), parts.activation(keys), bias=keys.flag("mlp_bias"))
    norm = multipliers(keys).norm(parts.rms_norm(keys))
    windows = parts.same_windows(keys)
    return parts.decoder(keys, parts.with_windows(Layer(mixer, mlp, norm), windows), norm)


def _rewrites(keys: Keys) -> dict[str, Rewrite]:
    return multipliers(keys).rewrites()


def multipliers(keys: Keys) -> parts.Multipliers:
    """Read the multipliers that loading folds into weights."""
    embedding, residual, logits = (
        keys.number(key, parts.MULTIPLIER, 1.0)
        for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    )
    return parts.Multipliers(embedding, residual, 1 / logits)


FAMILY: Final = Family("GraniteForCausalLM", "granite", network, rewrites=_rewrites)
