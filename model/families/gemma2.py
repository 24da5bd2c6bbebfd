"""Gemma 2: norms before and after attention and MLP, GELU gate, softcaps; every second layer has a window."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import LLAMA, Rewrite
from model.network.spec import Attention, Dense, Layer, Network

_TENSORS: Final = dataclasses.replace(
    LLAMA,
    layer_modules={
        **LLAMA.layer_modules,
        "output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "down_norm": "post_feedforward_layernorm",
    },
)
_RENAMED: Final = {"hidden_act": "hidden_activation"}
_NORMS: Final = (
    "norm", "input_norm", "q_norm", "k_norm", "output_norm", "mlp_norm", "down_norm",
)  # fmt: skip


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=4, head_dim=256)
    norm = parts.rms_norm(keys, float32=True)
    bias = keys.flag("attention_bias")
    mixer = Attention(
        heads,
        kv_heads,
        dim,
        scale=keys.integer("query_pre_attn_scalar", parts.SCALAR, 256) ** -0.5,
        rotary=read_rotary(keys, dim),
        softcap=keys.optional_number("attn_logit_softcapping", parts.SOFTCAP, 50.0),
        bias=bias,
        output_bias=bias,
    )
    mlp = Dense(parts.inner_size(keys), parts.activation(keys, parts.GELUS))
    layer = Layer(mixer, mlp, norm, post_norms=True)
    keys.require("use_bidirectional_attention", False)
    return parts.decoder(
        keys,
        parts.with_windows(layer, parts.windows_by_pattern(keys, 2)),
        norm,
        tied=True,
        embedding_factor=parts.hidden_size(keys) ** 0.5,
        logit_softcap=keys.optional_number("final_logit_softcapping", parts.SOFTCAP, 30.0),
    )


def _rewrites(_: Keys) -> dict[str, Rewrite]:
    """Return those of the norms, whose weights are stored less 1."""
    return dict.fromkeys(_NORMS, Rewrite(offset=1.0))


FAMILY: Final = Family("Gemma2ForCausalLM", "gemma2", network, _TENSORS, _rewrites, _RENAMED)
