"""Apertus: Llama with norms of the heads of queries and keys, and xIELU without a gate, which each layer learns."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import LLAMA
from model.network.spec import Attention, Dense, Layer, Network

_TENSORS: Final = dataclasses.replace(
    LLAMA,
    layer_modules={
        **LLAMA.layer_modules,
        "input_norm": "attention_layernorm",
        "mlp_norm": "feedforward_layernorm",
        "alpha_p": "mlp.act_fn.alpha_p",
        "alpha_n": "mlp.act_fn.alpha_n",
    },
    constants={"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6},
)
_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("qk_norm", True)
    keys.require("post_norm", False)
    keys.require("mlp_bias", False)
    heads, kv_heads, dim = parts.heads(keys)
    bias, norm = keys.flag("attention_bias"), parts.rms_norm(keys, 1e-5)
    mixer = Attention(
        heads,
        kv_heads,
        dim,
        dim**-0.5,
        rotary=read_rotary(keys, dim, theta=12_000_000.0, absent=_ROPE),
        qk_norm=norm,
        bias=bias,
        output_bias=bias,
    )
    mlp = Dense(parts.inner_size(keys), parts.activation(keys, ("xielu",)), gated=False)
    windows = parts.same_windows(keys)
    return parts.decoder(keys, parts.with_windows(Layer(mixer, mlp, norm), windows), norm)


FAMILY: Final = Family("ApertusForCausalLM", "apertus", network, _TENSORS)
