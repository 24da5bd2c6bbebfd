"""Granite 3: Llama with multipliers, which loading folds into weights, so that its layers are Llama's.

Embeddings are multiplied by e, and what a layer adds to the stream by r. A norm does not depend on the scale of the
stream, so the stream divided by e has the embeddings unchanged, r / e in the weights that add to it, and eps / e^2 in
the norms. The weight of the last norm divides the logits.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from msgspec import Meta

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import Rewrite
from model.network.spec import Attention, Dense, Layer, Network

_MULTIPLIER: Final = Meta(ge=1e-6, le=1e6)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys)
    bias, norm = keys.flag("attention_bias"), parts.rms_norm(keys)
    scale = keys.number("attention_multiplier", _MULTIPLIER, 1.0)
    rotary = read_rotary(keys, dim)
    mixer = Attention(heads, kv_heads, dim, scale, rotary=rotary, bias=bias, output_bias=bias)
    mlp = Dense(parts.inner_size(keys), parts.activation(keys), bias=keys.flag("mlp_bias"))
    norm = dataclasses.replace(norm, eps=norm.eps / _multiplier(keys, "embedding_multiplier") ** 2)
    windows = parts.same_windows(keys)
    return parts.decoder(keys, parts.with_windows(Layer(mixer, mlp, norm), windows), norm)


def rewrites(keys: Keys) -> dict[str, Rewrite]:
    """Return what loading changes."""
    added = _multiplier(keys, "residual_multiplier") / _multiplier(keys, "embedding_multiplier")
    logits = _multiplier(keys, "logits_scaling")
    return {"output": Rewrite(added), "down": Rewrite(added), "norm": Rewrite(1 / logits)}


def _multiplier(keys: Keys, key: str) -> float:
    return keys.number(key, _MULTIPLIER, 1.0)


FAMILY: Final = Family("GraniteForCausalLM", "granite", network, rewrites=rewrites)
