"""Gemma 3n (text): Gemma 4's small sizes with AltUp, LAuReL and sparse gates, and equal heads in all layers."""

from __future__ import annotations

import dataclasses
from typing import Final

from msgspec import Meta

from model.errors import ModelFolderError, UnsupportedModelError
from model.families import gemma4, parts
from model.families.gemma4 import gelu, kv_layers, per_layer_table
from model.families.keys import Keys
from model.families.rotary import POSITIONS, read_rotary_by_layer_type
from model.network.spec import Attention, Dense, Layer, Network
from model.network.sublayers import AltUp, Laurel, PerLayerInput, Streams

_STREAMS: Final = Meta(ge=2, le=64)
_ACTIVE: Final = Meta(ge=0, le=63)
_RANK: Final = Meta(ge=1, le=65_536)
_SPARSITY: Final = Meta(ge=0, lt=1)
_PATTERN: Final = 5
_SPARSE_LAYERS: Final = 10
_GEMMA4: Final = gemma4.FAMILY.tensors
_TENSORS: Final = dataclasses.replace(
    _GEMMA4,
    modules={
        **_GEMMA4.modules,
        "streams_in": "altup_projections",
        "streams_out": "altup_unembed_projections",
    },
    layer_modules={
        **_GEMMA4.layer_modules,
        "laurel_in": "laurel.linear_left",
        "laurel_out": "laurel.linear_right",
        "laurel_out_norm": "laurel.post_laurel_norm",
        "altup_norm": "altup.router_norm",
        "altup_router": "altup.modality_router",
        "altup_predict": "altup.prediction_coefs",
        "altup_correct": "altup.correction_coefs",
        "altup_scale": "altup.correct_output_scale",
    },
)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=2, head_dim=256)
    norm, count = parts.rms_norm(keys), parts.num_layers(keys)
    bias = keys.flag("attention_bias")
    full, local = read_rotary_by_layer_type(keys, dim, (1_000_000.0, 10_000.0))
    kinds = parts.layer_types(keys) or [
        parts.FULL if (index + 1) % _PATTERN == 0 else parts.SLIDING for index in range(count)
    ]
    window = keys.integer("sliding_window", POSITIONS, 512)
    sources = kv_layers(keys, kinds, keys.integer("num_kv_shared_layers", gemma4.SHARED, 15))
    inners = keys.for_layers("intermediate_size", parts.INNER, [16_384] * count)
    sparse = [0.95 if index < _SPARSE_LAYERS < count else 0.0 for index in range(count)]
    sparsities = keys.for_layers("activation_sparsity_pattern", _SPARSITY, sparse)
    function = gelu(keys)
    table = per_layer_table(keys, norm.eps)
    if table is None:
        raise UnsupportedModelError(
            f"{keys.name('hidden_size_per_layer_input')} = 0 is not supported with this architecture"
        )
    num_streams = keys.integer("altup_num_inputs", _STREAMS, 4)
    active = keys.integer("altup_active_idx", _ACTIVE, 0)
    if active >= num_streams:
        raise ModelFolderError(
            f"{keys.name('altup_active_idx')} = {active} must be less than altup_num_inputs = {num_streams}"
        )
    altup = AltUp(num_streams, active, keys.flag("altup_correct_scale", default=True))
    laurel = Laurel(keys.integer("laurel_rank", _RANK, 64))
    layers = tuple(
        Layer(
            Attention(
                heads,
                kv_heads,
                dim,
                scale=1.0,
                window=None if kind == parts.FULL else window,
                rotary=full if kind == parts.FULL else local,
                qk_norm=norm,
                bias=bias,
                output_bias=bias,
                value_norm=True,
                kv_layer=source,
            ),
            Dense(int(inner), function, sparsity=float(sparsity)),
            norm,
            post_norms=True,
            per_layer=PerLayerInput(table.size, function),
            laurel=laurel,
            altup=altup,
        )
        for kind, source, inner, sparsity in zip(kinds, sources, inners, sparsities, strict=True)
    )
    found = parts.decoder(
        keys,
        layers,
        norm,
        tied=True,
        embedding_factor=parts.hidden_size(keys) ** 0.5,
        logit_softcap=keys.optional_number("final_logit_softcapping", parts.SOFTCAP, 30.0),
    )
    return dataclasses.replace(found, per_layer=table, streams=Streams(num_streams))


FAMILY: Final = dataclasses.replace(
    gemma4.FAMILY,
    architecture="Gemma3nForCausalLM",
    model_type="gemma3n_text",
    network=network,
    tensors=_TENSORS,
    defaults={
        "vocab_size": 262_400,
        "hidden_size": 2048,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "max_position_embeddings": 32_768,
    },
)
