"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one layer norm, biases, heads that rotate in part."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import HEAD, Tensors
from model.network.spec import Attention, Dense, Layer, Network

_TENSORS: Final = Tensors(
    {"embed_tokens": "embed_tokens", "norm": "final_layernorm", HEAD: HEAD},
    {
        "input_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "output": "self_attn.dense",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    },
)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("qk_layernorm", False)
    heads, kv_heads, dim = parts.heads(keys)
    norm, rotary = parts.layer_norm(keys), read_rotary(keys, dim, partial=0.5)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=True, output_bias=True)
    activation = parts.activation(keys, ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu"))
    mlp = Dense(parts.inner_size(keys), activation, gated=False, bias=True)
    layer = Layer(mixer, mlp, norm, parallel=True, shared_norm=True)
    layers = parts.with_windows(layer, parts.same_windows(keys))
    return parts.decoder(keys, layers, norm, head_bias=True)


FAMILY: Final = Family("PhiForCausalLM", "phi", network, _TENSORS)
