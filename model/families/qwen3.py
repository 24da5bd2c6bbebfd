"""Qwen3 (dense): Llama with norms of the heads of queries and keys, and windows by layer."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys, *, sections: bool = False) -> Network:
    """Return the network of a config.json; `sections` as for `read_rotary`."""
    heads, kv_heads, dim = parts.heads(keys, head_dim=128)
    bias, norm = keys.flag("attention_bias"), parts.rms_norm(keys)
    mixer = Attention(
        heads,
        kv_heads,
        dim,
        scale=dim**-0.5,
        rotary=read_rotary(keys, dim, sections=sections),
        qk_norm=norm,
        bias=bias,
        output_bias=bias,
    )
    layer = Layer(mixer, Dense(parts.inner_size(keys), parts.activation(keys)), norm)
    return parts.decoder(keys, parts.with_windows(layer, parts.windows_from_layer(keys)), norm)


FAMILY: Final = Family("Qwen3ForCausalLM", "qwen3", network)
