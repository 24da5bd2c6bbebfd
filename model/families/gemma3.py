"""Gemma 3 (text): Gemma 2 with norms per head and no softcap of scores; layers with a window have another rotation."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import gemma2, parts
from model.families.keys import Keys
from model.families.rotary import read_rotary_by_layer_type
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=4, head_dim=256)
    norm = parts.rms_norm(keys, float32=True)
    bias = keys.flag("attention_bias")
    full, local = read_rotary_by_layer_type(keys, dim, (1_000_000.0, 10_000.0))
    mixer = Attention(
        heads,
        kv_heads,
        dim,
        scale=keys.integer("query_pre_attn_scalar", parts.SCALAR, 256) ** -0.5,
        rotary=full,
        qk_norm=norm,
        bias=bias,
        output_bias=bias,
    )
    mlp = Dense(parts.inner_size(keys), parts.activation(keys, parts.GELUS))
    layer = Layer(mixer, mlp, norm, post_norms=True)
    keys.require("use_bidirectional_attention", False)
    return parts.decoder(
        keys,
        parts.with_windows(layer, parts.windows_by_pattern(keys, 6), local),
        norm,
        tied=True,
        embedding_factor=parts.hidden_size(keys) ** 0.5,
        logit_softcap=keys.optional_number("final_logit_softcapping", parts.SOFTCAP),
    )


FAMILY: Final = dataclasses.replace(
    gemma2.FAMILY, architecture="Gemma3ForCausalLM", model_type="gemma3_text", network=network
)
