"""OPT, except 350M: layer norms, biases, ReLU without a gate, learned positions."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import POSITIONS
from model.families.tensors import HEAD, Tensors
from model.network.spec import Attention, Dense, Layer, Network, Norm, Positions

_TENSORS: Final = Tensors(
    {
        "embed_tokens": "embed_tokens",
        "embed_positions": "embed_positions",
        "norm": "final_layer_norm",
        HEAD: HEAD,
    },
    {
        "input_norm": "self_attn_layer_norm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "output": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    },
    prefix="model.decoder.",
)
_RENAMED: Final = {
    "intermediate_size": "ffn_dim",
    "initializer_range": "init_std",
    "hidden_act": "activation_function",
}


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("do_layer_norm_before", True)
    keys.require("layer_norm_elementwise_affine", True)
    keys.require("_remove_final_layer_norm", False)
    keys.require("word_embed_proj_dim", parts.hidden_size(keys))
    heads, kv_heads, dim = parts.equal_heads(keys)
    norm, bias = Norm(1e-5, "layer"), keys.flag("enable_bias", default=True)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=None, bias=bias, output_bias=bias)
    activation = parts.activation(keys, ("relu", "gelu_new", "gelu_pytorch_tanh", "gelu"))
    mlp = Dense(parts.inner_size(keys), activation, gated=False, bias=bias)
    return parts.decoder(
        keys,
        parts.with_windows(Layer(mixer, mlp, norm), parts.same_windows(keys)),
        norm,
        tied=True,
        positions=Positions(keys.integer("max_position_embeddings", POSITIONS), offset=2),
    )


FAMILY: Final = Family("OPTForCausalLM", "opt", network, _TENSORS, renamed=_RENAMED)
