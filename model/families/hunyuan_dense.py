"""HunYuan (dense): Llama with norms of the heads of queries and keys after the rotation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from msgspec import Meta

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary, rope_parameters
from model.families.tensors import LLAMA
from model.network.spec import Attention, Dense, Layer, Network, RopeType, Rotary

# Others scale what they rotate, which the norms after them undo.
_TYPES: Final[Mapping[str, RopeType]] = {
    "default": "default",
    "dynamic": "dynamic",
    "linear": "linear",
    "llama3": "llama3",
}

_TENSORS: Final = dataclasses.replace(
    LLAMA,
    layer_modules={
        **LLAMA.layer_modules,
        "q_norm": "self_attn.query_layernorm",
        "k_norm": "self_attn.key_layernorm",
    },
)
_ALPHA: Final = Meta(ge=1, le=1e6)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    for key in ("mlp_bias", "use_cla", "use_mla", "position_embedding_xdrope"):
        keys.require(key, False)
    heads, kv_heads, dim = parts.heads(keys)
    bias, norm = keys.flag("attention_bias"), parts.rms_norm(keys, 1e-5)
    has_norms = keys.flag("use_qk_norm", default=True)
    mixer = Attention(
        heads,
        kv_heads,
        dim,
        dim**-0.5,
        rotary=_rotary(keys, dim),
        qk_norm=norm if has_norms else None,
        late_qk_norm=has_norms,
        bias=bias,
        output_bias=bias,
    )
    layer = Layer(mixer, Dense(parts.inner_size(keys), parts.activation(keys)), norm)
    return parts.decoder(keys, parts.with_windows(layer, parts.same_windows(keys)), norm)


def _rotary(keys: Keys, dim: int) -> Rotary:
    """Read the rotary embedding, whose base `alpha` stretches whatever the length of a text.

    Source: transformers 5, `HunYuanDenseV1RotaryEmbedding.compute_ntk_alpha_rope_parameters`.
    """
    rope = rope_parameters(keys)
    alpha = rope.optional_number("alpha", _ALPHA)
    if not alpha or (rope.text("rope_type") or rope.text("type")) != "dynamic":
        return read_rotary(keys, dim, types=_TYPES)
    theta = read_rotary(keys, dim, types={"dynamic": "default"}).theta
    return Rotary(theta=theta * alpha ** (dim / (dim - 2)))


FAMILY: Final = Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", network, _TENSORS)
