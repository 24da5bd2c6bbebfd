"""GPT-NeoX, Pythia, Dolly 2, RedPajama-INCITE: layer norms, biases, heads that rotate in part, parallel MLP."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import HEAD, Tensors
from model.network.spec import Attention, Dense, Layer, Network

_TENSORS: Final = Tensors(
    {"embed_tokens": "embed_in", "norm": "final_layer_norm", HEAD: "embed_out"},
    {
        "input_norm": "input_layernorm",
        **dict.fromkeys(("q", "k", "v"), "attention.query_key_value"),
        "output": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    prefix="gpt_neox.",
    grouped_qkv=True,
    aliases={"lm_head.": "embed_out."},  # in files of the module's own state, since transformers 5
)
_RENAMED: Final = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu")


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.equal_heads(keys)
    norm, bias = parts.layer_norm(keys), keys.flag("attention_bias", default=True)
    rotary = read_rotary(keys, dim, partial=0.25)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias)
    activation = parts.activation(keys, _ACTIVATIONS)
    mlp = Dense(parts.inner_size(keys), activation, gated=False, bias=True)
    parallel = keys.flag("use_parallel_residual", default=True)
    layer = Layer(mixer, mlp, norm, parallel=parallel)
    return parts.decoder(keys, parts.with_windows(layer, parts.same_windows(keys)), norm)


FAMILY: Final = Family("GPTNeoXForCausalLM", "gpt_neox", network, _TENSORS, renamed=_RENAMED)
