"""OLMo 2: Llama with norms after attention and MLP in place of those before, and of all queries and keys of a token."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import LLAMA
from model.network.spec import Attention, Dense, Layer, Network, Rotary

_TENSORS: Final = dataclasses.replace(
    LLAMA,
    layer_modules={
        **LLAMA.layer_modules,
        "output_norm": "post_attention_layernorm",
        "down_norm": "post_feedforward_layernorm",
    },
)


def layer(keys: Keys, rotary: Rotary | None = None) -> Layer:
    """Return the layer that a config.json states.

    Args:
        keys: of config.json.
        rotary: another rotary embedding than the one that they state for all layers.
    """
    heads, kv_heads, dim = parts.heads(keys)
    bias, norm = keys.flag("attention_bias"), parts.rms_norm(keys)
    mixer = Attention(
        heads,
        kv_heads,
        dim,
        dim**-0.5,
        rotary=rotary or read_rotary(keys, dim),
        qk_norm=norm,
        joint_qk_norm=True,
        bias=bias,
        output_bias=bias,
    )
    mlp = Dense(parts.inner_size(keys), parts.activation(keys))
    return Layer(mixer, mlp, norm, pre_norms=False, post_norms=True)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    layers = parts.with_windows(stated := layer(keys), parts.same_windows(keys))
    return parts.decoder(keys, layers, stated.norm)


FAMILY: Final = Family(
    "Olmo2ForCausalLM", "olmo2", network, _TENSORS, defaults={"rms_norm_eps": 1e-5}
)
