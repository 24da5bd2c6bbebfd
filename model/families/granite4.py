"""Granite 4 (dense): Mamba-2 and attention, most often without a rotation, and multipliers, which loading folds."""

from __future__ import annotations

import dataclasses
from typing import Final

from msgspec import Meta

from model.errors import UnsupportedModelError
from model.families import parts
from model.families.family import Family
from model.families.granite import multipliers
from model.families.keys import Keys
from model.families.mamba2 import ATTENTION, LINEAR, read_mamba2
from model.families.rotary import read_rotary
from model.families.tensors import LLAMA, MAMBA2, Rewrite
from model.network.spec import Attention, Dense, Layer, Network

_TENSORS: Final = dataclasses.replace(
    LLAMA,
    layer_modules={
        **LLAMA.layer_modules,
        **MAMBA2,
        **dict.fromkeys(("gate", "up"), "shared_mlp.input_linear"),
        "down": "shared_mlp.output_linear",
    },
)
_SEPARATE: Final = {"gate": "shared_mlp.gate_proj", "up": "shared_mlp.up_proj"}


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    if experts := keys.integer("num_local_experts", Meta(ge=0), 8):
        raise UnsupportedModelError(
            f"num_local_experts = {experts} is not supported: a mixture of experts; pick a checkpoint with 0"
        )
    keys.require("normalization_function", "rmsnorm")
    heads, kv_heads, dim = parts.heads(keys)
    bias = keys.flag("attention_bias")
    rotary = read_rotary(keys, dim)
    attention = Attention(
        heads,
        kv_heads,
        dim,
        keys.number("attention_multiplier", parts.MULTIPLIER, 1.0),
        rotary=rotary if keys.text("position_embedding_type") == "rope" else None,
        bias=bias,
        output_bias=bias,
    )
    plain = parts.rms_norm(keys)
    kinds = parts.layer_types(keys, (*LINEAR, *ATTENTION)) or LINEAR[:1] * parts.num_layers(keys)
    mamba2 = read_mamba2(keys, plain.eps) if {*kinds} & {*LINEAR} else None
    norm = multipliers(keys).norm(plain)
    mlp = Dense(keys.integer("shared_intermediate_size", parts.INNER, 1024), parts.activation(keys))
    layers = tuple(Layer(mamba2 if kind in LINEAR else attention, mlp, norm) for kind in kinds)
    return parts.decoder(keys, layers, norm)


def _stated_modules(keys: Keys) -> dict[str, str]:
    """Return the names of gate and up of a GGUF file, which has them as two tensors, and those of a folder as one."""
    return _SEPARATE if keys.flag("separate_gate_and_up") else {}


def _rewrites(keys: Keys) -> dict[str, Rewrite]:
    return multipliers(keys).rewrites()


FAMILY: Final = Family(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    network,
    _TENSORS,
    stated_modules=_stated_modules,
    rewrites=_rewrites,
    synonyms={"layers_block_type": "layer_types"},
    defaults={"max_position_embeddings": 2048},
)
