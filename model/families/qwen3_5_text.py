"""Qwen3.5 (dense): layers with the gated delta rule, and some with attention whose result has a gate."""

from __future__ import annotations

import dataclasses
from typing import Final

from msgspec import Meta

from model.errors import ModelFolderError
from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import LLAMA, Rewrite
from model.network.mixers import GatedDelta
from model.network.spec import Attention, Dense, Layer, Network

_TENSORS: Final = dataclasses.replace(
    LLAMA,
    layer_modules={
        **LLAMA.layer_modules,
        "q_gate": "self_attn.q_proj",
        "mixed_in": "linear_attn.in_proj_qkv",
        "z": "linear_attn.in_proj_z",
        "beta": "linear_attn.in_proj_b",
        "alpha": "linear_attn.in_proj_a",
        "conv": "linear_attn.conv1d",
        "a_log": "linear_attn.A_log",
        "dt_bias": "linear_attn.dt_bias",
        "gated_norm": "linear_attn.norm",
        "mixed": "linear_attn.out_proj",
    },
    # The head that proposes tokens, and an image encoder.
    ignored=("mtp.", "model.mtp.", "visual.", "model.visual."),
)
_DIM: Final = Meta(ge=4, le=1_024)
_INTERVAL: Final = Meta(ge=1, le=1_024)
_LINEAR: Final = "linear_attention"
DEFAULTS: Final = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
}
"""Of the configuration class in transformers."""


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, head_dim=256)
    norm, bias = parts.rms_norm(keys, float32=True), keys.flag("attention_bias")
    attention = Attention(
        heads,
        kv_heads,
        dim,
        dim**-0.5,
        rotary=read_rotary(keys, dim, partial=0.25, sections=True),
        qk_norm=norm,
        bias=bias,
        output_bias=bias,
        gate=keys.flag("attn_output_gate", default=True),
    )
    delta = GatedDelta(
        *_linear_heads(keys),
        key_dim=keys.integer("linear_key_head_dim", _DIM, 128),
        value_dim=keys.integer("linear_value_head_dim", _DIM, 128),
        width=keys.integer("linear_conv_kernel_dim", parts.CONV_WIDTH, 4),
        eps=norm.eps,
    )
    mlp = Dense(parts.inner_size(keys), parts.activation(keys))
    layers = tuple(
        Layer(delta if kind == _LINEAR else attention, mlp, norm) for kind in _kinds(keys)
    )
    return parts.decoder(keys, layers, norm)


def _linear_heads(keys: Keys) -> tuple[int, int]:
    """Read the heads of values, and those of queries and keys, of the gated delta rule."""
    values = keys.integer("linear_num_value_heads", parts.HEADS, 32)
    count = keys.integer("linear_num_key_heads", parts.HEADS, 16)
    if values % count:
        raise ModelFolderError(
            f"{keys.name('linear_num_value_heads')} = {values} must be a multiple of linear_num_key_heads = {count}"
        )
    return values, count


def _kinds(keys: Keys) -> list[str]:
    """Read the type of each layer.

    Source: transformers 5, `Qwen3_5TextConfig.__post_init__`.
    """
    kinds = parts.FULL, _LINEAR
    interval = keys.integer("full_attention_interval", _INTERVAL, 4)
    if stated := parts.layer_types(keys, kinds):
        return stated
    return [kinds[(it + 1) % interval > 0] for it in range(parts.num_layers(keys))]


def _rewrites(_: Keys) -> dict[str, Rewrite]:
    norms = "input_norm", "mlp_norm", "q_norm", "k_norm", "norm"
    return dict.fromkeys(norms, Rewrite(offset=1.0))


FAMILY: Final = Family(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    network,
    _TENSORS,
    rewrites=_rewrites,
    defaults=DEFAULTS,
)
