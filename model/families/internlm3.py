"""InternLM 3: Llama with biases."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=2, head_dim=128)
    bias, norm = keys.flag("mlp_bias"), parts.rms_norm(keys, 1e-5)
    mixer = Attention(
        heads,
        kv_heads,
        dim,
        dim**-0.5,
        rotary=read_rotary(keys, dim),
        bias=keys.flag("attention_bias"),
        output_bias=bias,
    )
    layer = Layer(mixer, Dense(parts.inner_size(keys), parts.activation(keys), bias=bias), norm)
    return parts.decoder(keys, parts.with_windows(layer, parts.same_windows(keys)), norm)


FAMILY: Final = Family(
    "InternLM3ForCausalLM",
    "internlm3",
    network,
    also=("LlamaForCausalLM",),
    synonyms={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)
