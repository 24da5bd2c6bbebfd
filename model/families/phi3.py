"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini: Llama with stacked projections, windows, and heads that rotate in part."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import POSITIONS, read_rotary
from model.families.tensors import LLAMA
from model.network.spec import Attention, Dense, Layer, Network

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model.network.spec import RopeType

_TENSORS: Final = dataclasses.replace(
    LLAMA,
    layer_modules={
        **LLAMA.layer_modules,
        **dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj"),
        **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
    },
)
# The first files say "su" and "yarn" for what later ones call "longrope".
_ROPE_TYPES: Final[Mapping[str, RopeType]] = {
    "default": "default",
    **dict.fromkeys(("longrope", "su", "yarn"), "longrope"),
}


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        keys.require(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        keys.require(key, 1)
    heads, kv_heads, dim = parts.heads(keys)
    norm = parts.rms_norm(keys)
    rotary = read_rotary(keys, dim, partial=1.0, types=_ROPE_TYPES)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary)
    layer = Layer(mixer, Dense(parts.inner_size(keys), parts.activation(keys)), norm)
    window = keys.optional_integer("sliding_window", POSITIONS)
    if window is not None and window >= keys.integer("max_position_embeddings", POSITIONS):
        window = None  # as the files of the 128k models state it
    return parts.decoder(keys, parts.with_windows(layer, parts.same_windows(keys, window)), norm)


FAMILY: Final = Family(
    "Phi3ForCausalLM",
    "phi3",
    network,
    _TENSORS,
    defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
)
