"""StableLM 3B and StableLM 2 1.6B: Llama with layer norms, of whose heads a quarter rotates."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("qk_layernorm", False)
    heads, kv_heads, dim = parts.heads(keys)
    norm, rotary = parts.layer_norm(keys), read_rotary(keys, dim, partial=0.25)
    bias = keys.flag("use_qkv_bias")
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias)
    parallel = keys.flag("use_parallel_residual")
    mlp = Dense(parts.inner_size(keys), parts.activation(keys))
    layer = Layer(mixer, mlp, norm, parallel=parallel, shared_norm=parallel)
    return parts.decoder(keys, parts.with_windows(layer, parts.same_windows(keys)), norm)


FAMILY: Final = Family(
    "StableLmForCausalLM", "stablelm", network, defaults={"num_key_value_heads": 32}
)
