"""GPT-J: attention and MLP in parallel after one layer norm, heads that rotate in part, a head with a bias."""

from __future__ import annotations

from typing import Final

from msgspec import Meta

from model.errors import ModelFolderError
from model.families import parts
from model.families.family import Family
from model.families.gpt2 import RENAMED
from model.families.keys import Keys
from model.families.tensors import HEAD, Tensors
from model.network.spec import Attention, Dense, Layer, Network, Rotary

_TENSORS: Final = Tensors(
    {"embed_tokens": "wte", "norm": "ln_f", HEAD: HEAD},
    {
        "input_norm": "ln_1",
        "q": "attn.q_proj",
        "k": "attn.k_proj",
        "v": "attn.v_proj",
        "output": "attn.out_proj",
        "up": "mlp.fc_in",
        "down": "mlp.fc_out",
    },
    prefix="transformer.",
    layers="h.",
    interleaved_rotary=True,
)
_ROTARY_DIMS: Final = Meta(ge=2)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.equal_heads(keys)
    norm = parts.layer_norm(keys)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=_rotary(keys, dim))
    inner = parts.inner_size(keys, 4 * parts.hidden_size(keys))
    activation = parts.activation(keys, ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu"))
    mlp = Dense(inner, activation, gated=False, bias=True)
    layer = Layer(mixer, mlp, norm, parallel=True, shared_norm=True)
    layers = parts.with_windows(layer, parts.same_windows(keys))
    return parts.decoder(keys, layers, norm, head_bias=True)


def _rotary(keys: Keys, head_dim: int) -> Rotary:
    dims = keys.integer("rotary_dim", _ROTARY_DIMS, 64)
    if dims % 2 or dims > head_dim:
        raise ModelFolderError(
            f"rotary_dim must be an even number from 2 to the {head_dim} dimensions of a head, found {dims}"
        )
    return Rotary(dims=None if dims == head_dim else dims)


FAMILY: Final = Family("GPTJForCausalLM", "gptj", network, _TENSORS, renamed=RENAMED)
