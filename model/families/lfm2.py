"""LFM2 and LFM2.5 (dense): gated short convolutions, and attention with norms per head in a few layers."""

from __future__ import annotations

from typing import Final

from msgspec import Meta

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import HEAD, Tensors
from model.network.mixers import ShortConv
from model.network.spec import Attention, Dense, Layer, Network

_TENSORS: Final = Tensors(
    {"embed_tokens": "embed_tokens", "norm": "embedding_norm", HEAD: HEAD},
    {
        "input_norm": "operator_norm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
        "output": "self_attn.out_proj",
        "input": "conv.in_proj",
        "conv": "conv.conv",
        "mixed": "conv.out_proj",
        "mlp_norm": "ffn_norm",
        "gate": "feed_forward.w1",
        "up": "feed_forward.w3",
        "down": "feed_forward.w2",
    },
)
_MULTIPLE: Final = Meta(ge=1, le=65_536)
_CONV: Final = "conv"


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("conv_dim", parts.hidden_size(keys))
    keys.require("conv_dim_out", parts.hidden_size(keys))
    for key in ("block_use_swiglu", "use_pos_enc"):
        keys.require(key, True)
    heads, kv_heads, dim = parts.heads(keys)
    norm = parts.rms_norm(keys, 1e-5)
    attention = Attention(
        heads,
        kv_heads,
        dim,
        dim**-0.5,
        rotary=read_rotary(keys, dim, theta=1_000_000.0),
        qk_norm=norm,
    )
    convolution = ShortConv(
        parts.hidden_size(keys),
        keys.integer("conv_L_cache", parts.CONV_WIDTH, 3),
        bias=keys.flag("conv_bias"),
    )
    mlp = Dense(_inner_size(keys))
    layers = tuple(
        Layer(convolution if kind == _CONV else attention, mlp, norm) for kind in _kinds(keys)
    )
    tied = keys.flag("tie_embedding", default=True)
    return parts.decoder(keys, layers, norm, tied=tied)


def _kinds(keys: Keys) -> list[str]:
    """Read the type of each layer.

    Source: transformers 5, `Lfm2Config.__post_init__`.
    """
    kinds = parts.FULL, _CONV
    attention = parts.layer_indices(keys, "full_attn_idxs")
    if stated := parts.layer_types(keys, kinds):
        return stated
    return [
        kinds[attention is not None and it not in attention] for it in range(parts.num_layers(keys))
    ]


def _inner_size(keys: Keys) -> int:
    """Read the elements between the matrices of an MLP.

    Source: transformers 5, `Lfm2MLP`.
    """
    inner = keys.optional_integer("block_ff_dim", parts.INNER) or parts.inner_size(keys)
    multiple = keys.integer("block_multiple_of", _MULTIPLE, 256)
    multiplier = keys.optional_number("block_ffn_dim_multiplier", parts.MULTIPLIER, 1.0)
    if not keys.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = int(2 * inner / 3)
    if multiplier is None:
        return inner
    return -(-int(multiplier * inner) // multiple) * multiple


FAMILY: Final = Family(
    "Lfm2ForCausalLM",
    "lfm2",
    network,
    _TENSORS,
    renamed={"rms_norm_eps": "norm_eps"},
    defaults={"max_position_embeddings": 128_000},
)
