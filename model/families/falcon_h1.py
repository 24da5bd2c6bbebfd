"""Falcon-H1: attention and Mamba-2 beside each other in every layer, and multipliers, which loading folds."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.mamba2 import read_mamba2
from model.families.rotary import read_rotary
from model.families.tensors import HEAD, LLAMA, MAMBA2, Rewrite
from model.network.mixers import Parallel
from model.network.spec import Attention, Dense, Layer, Network

TENSORS: Final = dataclasses.replace(
    LLAMA,
    modules={"embed_tokens": "embed_tokens", "norm": "final_layernorm", HEAD: HEAD},
    layer_modules={
        **LLAMA.layer_modules,
        **MAMBA2,
        "mlp_norm": "pre_ff_layernorm",
        "gate": "feed_forward.gate_proj",
        "up": "feed_forward.up_proj",
        "down": "feed_forward.down_proj",
    },
)
_SECTIONS: Final = ("z", "x", "b", "c", "dt")
"""The rows of Mamba-2's input projection, each of which has a multiplier."""


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=8)
    bias = keys.flag("attention_bias")
    rotary = read_rotary(keys, dim)
    attention = Attention(
        heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias
    )
    plain = parts.rms_norm(keys, 1e-5)
    mamba2 = read_mamba2(
        keys,
        plain.eps if keys.flag("mamba_rms_norm") else None,
        inner=keys.optional_integer("mamba_d_ssm", parts.INNER, 1024),
        norm_before_gate=keys.flag("mamba_norm_before_gate", default=True),
        output_bias=keys.flag("projectors_bias"),
    )
    mlp = Dense(parts.inner_size(keys), parts.activation(keys), bias=keys.flag("mlp_bias"))
    norm = _multipliers(keys).norm(plain)
    layer = Layer(Parallel((attention, mamba2)), mlp, norm)
    return parts.decoder(keys, (layer,) * parts.num_layers(keys), norm)


def _rewrites(keys: Keys) -> dict[str, Rewrite]:
    """Return what loading changes.

    Source: transformers 5, `FalconH1DecoderLayer` and `compute_mup_vector`.
    """
    multipliers = _multipliers(keys)
    before, after = (_number(keys, f"attention_{it}_multiplier") for it in ("in", "out"))
    state_before, state_after = (_number(keys, f"ssm_{it}_multiplier") for it in ("in", "out"))
    key = _number(keys, "key_multiplier")
    sections = keys.numbers("ssm_multipliers", parts.MULTIPLIER, (1.0,) * len(_SECTIONS))
    gate, down = keys.numbers("mlp_multipliers", parts.MULTIPLIER, (1.0, 1.0))
    to_stream = 1 / multipliers.embedding
    return {
        **multipliers.rewrites(),
        **dict.fromkeys(("q", "v"), Rewrite(before, bias=1.0)),
        "k": Rewrite(before * key, bias=key),
        "output": Rewrite(after * to_stream),
        **{
            section: Rewrite(state_before * it, bias=it)
            for section, it in zip(_SECTIONS, sections, strict=True)
        },
        "mixed": Rewrite(state_after * to_stream),
        "gate": Rewrite(gate),
        "down": Rewrite(down * to_stream),
    }


def _multipliers(keys: Keys) -> parts.Multipliers:
    return parts.Multipliers(
        _number(keys, "embedding_multiplier"), 1.0, _number(keys, "lm_head_multiplier")
    )


def _number(keys: Keys, key: str) -> float:
    return keys.number(key, parts.MULTIPLIER, 1.0)


FAMILY: Final = Family(
    "FalconH1ForCausalLM",
    "falcon_h1",
    network,
    TENSORS,
    rewrites=_rewrites,
    defaults={"max_position_embeddings": 8192},
)
