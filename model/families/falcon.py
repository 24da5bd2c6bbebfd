"""Falcon 7B and Falcon 2 11B: attention of few key-value heads and MLP in parallel after one layer norm."""

from __future__ import annotations

from typing import Final

from model.errors import UnsupportedModelError
from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import HEAD, Tensors
from model.network.spec import Attention, Dense, Layer, Network

_TENSORS: Final = Tensors(
    {"embed_tokens": "word_embeddings", "norm": "ln_f", HEAD: HEAD},
    {
        "input_norm": "input_layernorm",
        **dict.fromkeys(("q", "k", "v"), "self_attention.query_key_value"),
        "output": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    prefix="transformer.",
    layers="h.",
    grouped_qkv=True,
)
_RENAMED: Final = {
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation",
}


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("alibi", False)
    keys.require("num_ln_in_parallel_attn", 1)
    is_new = keys.flag("new_decoder_architecture")
    if is_new and keys.optional_integer("num_ln_in_parallel_attn", parts.SCALAR) is None:
        raise UnsupportedModelError(
            "new_decoder_architecture without num_ln_in_parallel_attn = 1 has two norms of parallel attention and MLP,"
            " which are not supported"
        )
    heads, kv_heads, dim = parts.heads(keys)
    if not is_new:
        kv_heads = 1 if keys.flag("multi_query", default=True) else heads
    parallel = keys.flag("parallel_attn", default=True)
    if is_new and not parallel:
        raise UnsupportedModelError(
            "parallel_attn = False is not supported with new_decoder_architecture"
        )
    norm, bias = parts.layer_norm(keys), keys.flag("bias")
    rotary = read_rotary(keys, dim)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias)
    inner = parts.inner_size(keys, 4 * parts.hidden_size(keys))
    activation = parts.activation(keys, ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"))
    mlp = Dense(inner, activation, gated=False, bias=bias)
    layer = Layer(mixer, mlp, norm, parallel=parallel, shared_norm=parallel)
    layers = parts.with_windows(layer, parts.same_windows(keys))
    return parts.decoder(keys, layers, norm, tied=True)


FAMILY: Final = Family(
    "FalconForCausalLM",
    "falcon",
    network,
    _TENSORS,
    renamed=_RENAMED,
    defaults={"max_position_embeddings": 2048},
)
