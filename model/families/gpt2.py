"""GPT-2, DistilGPT2 and Cerebras-GPT: layer norms, biases, GELU without a gate, learned positions."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import POSITIONS
from model.families.tensors import HEAD, Tensors
from model.network.spec import Attention, Dense, Layer, Network, Positions

TENSORS: Final = Tensors(
    {
        "embed_tokens": "wte",
        "embed_positions": "wpe",
        "norm": "ln_f",
        HEAD: HEAD,
    },
    {
        "input_norm": "ln_1",
        **dict.fromkeys(("q", "k", "v"), "attn.c_attn"),
        "output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    prefix="transformer.",
    layers="h.",
    transposed=True,
)
RENAMED: Final = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("scale_attn_by_inverse_layer_idx", False)
    return decoder(keys)


def decoder(keys: Keys, *, one_kv_head: bool = False) -> Network:
    """Return the network of a config.json, with as many key-value heads as query heads or one."""
    keys.require("scale_attn_weights", True)
    heads, kv_heads, dim = parts.equal_heads(keys)
    norm, kv_heads = parts.layer_norm(keys), 1 if one_kv_head else kv_heads
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=None, bias=True, output_bias=True)
    inner = parts.inner_size(keys, 4 * parts.hidden_size(keys))
    activation = parts.activation(keys, ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu"))
    layer = Layer(mixer, Dense(inner, activation, gated=False, bias=True), norm)
    return parts.decoder(
        keys,
        parts.with_windows(layer, parts.same_windows(keys)),
        norm,
        tied=True,
        positions=Positions(keys.integer("max_position_embeddings", POSITIONS)),
    )


FAMILY: Final = Family("GPT2LMHeadModel", "gpt2", network, TENSORS, renamed=RENAMED)
