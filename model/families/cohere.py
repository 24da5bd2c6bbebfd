"""Command R and R+: attention and MLP in parallel after one layer norm without a bias, and a factor on the logits."""

from __future__ import annotations

import dataclasses
from typing import Final

from msgspec import Meta

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import LLAMA, Rewrite
from model.network.spec import Attention, Dense, Layer, Network, Rotary

TENSORS: Final = dataclasses.replace(LLAMA, interleaved_rotary=True)
_SCALE: Final = Meta(ge=1e-6, le=1e6)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    dim = parts.heads(keys)[2]
    layer = parallel_layer(keys, read_rotary(keys, dim, theta=500_000.0))
    if keys.flag("use_qk_norm"):
        mixer = dataclasses.replace(layer.mixer, qk_norm=layer.norm, qk_norm_by_head=True)
        layer = dataclasses.replace(layer, mixer=mixer)
    layers = parts.with_windows(layer, parts.same_windows(keys))
    return parts.decoder(keys, layers, layer.norm, tied=True)


def parallel_layer(keys: Keys, rotary: Rotary | None) -> Layer:
    """Return a layer that attends to all tokens."""
    heads, kv_heads, dim = parts.heads(keys)
    bias, norm = keys.flag("attention_bias"), parts.layer_norm(keys, bias=False)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias)
    mlp = Dense(parts.inner_size(keys), parts.activation(keys))
    return Layer(mixer, mlp, norm, parallel=True, shared_norm=True)


def rewrites(keys: Keys) -> dict[str, Rewrite]:
    """Return what loading changes: the weight of the last norm, which has no bias, multiplies the logits."""
    return {"norm": Rewrite(keys.number("logit_scale", _SCALE, 0.0625))}


FAMILY: Final = Family("CohereForCausalLM", "cohere", network, TENSORS, rewrites)
