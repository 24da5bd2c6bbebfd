"""Gemma 4 (text): Gemma 3 with other heads in layers that attend to all tokens, and per-layer inputs in small sizes.

The last layers of the small sizes read the keys and values of the last layer before them of their type. Layers that
attend to all tokens have larger heads, of which a part rotates; in large sizes their values are their keys before the
norm and the rotation.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Literal

from msgspec import Meta

from model.errors import ModelFolderError
from model.families import gemma3, parts
from model.families.keys import Keys
from model.families.rotary import POSITIONS, read_rotary_of_layer_type
from model.families.tensors import Rewrite
from model.network.spec import Attention, Dense, Layer, Network
from model.network.sublayers import PerLayerInput, PerLayerTable

SHARED: Final = Meta(ge=0, le=1_024)
_TABLE: Final = Meta(ge=1, le=2**21)
_SIZE: Final = Meta(ge=0, le=65_536)
_PATTERN: Final = 6
_ROTARIES: Final[dict[str, dict[str, Any]]] = {
    parts.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    parts.FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}
_PER_LAYER: Final = {
    "embed_per_layer": "embed_tokens_per_layer",
    "per_layer_projection": "per_layer_model_projection",
    "per_layer_norm": "per_layer_projection_norm",
}
"""Modules of per-layer inputs outside the layers."""
_PER_LAYER_OF_LAYER: Final = {
    "per_layer_gate": "per_layer_input_gate",
    "per_layer_output": "per_layer_projection",
    "per_layer_output_norm": "post_per_layer_input_norm",
}
"""Those of a layer."""
_GEMMA3: Final = gemma3.FAMILY.tensors
_TENSORS: Final = dataclasses.replace(
    _GEMMA3,
    modules={**_GEMMA3.modules, **_PER_LAYER},
    layer_modules={**_GEMMA3.layer_modules, **_PER_LAYER_OF_LAYER, "scale": "layer_scalar"},
)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    keys.require("enable_moe_block", False)
    keys.accept("num_experts", "top_k_experts", "moe_intermediate_size")
    # Of images, whose tokens no request has.
    keys.require("use_bidirectional_attention", "vision")
    norm, count = parts.rms_norm(keys), parts.num_layers(keys)
    kinds = parts.layer_types(keys) or [
        parts.FULL if (index + 1) % _PATTERN == 0 else parts.SLIDING for index in range(count)
    ]
    kinds[-1] = parts.FULL  # as transformers does
    shared = keys.integer("num_kv_shared_layers", SHARED, 0)
    sources, mixers = kv_layers(keys, kinds, shared), _mixers(keys, kinds)
    _check_shared(keys, mixers, sources)
    inner = parts.inner_size(keys, 9216)
    wide = inner * (2 if keys.flag("use_double_wide_mlp") else 1)
    function = gelu(keys)
    table = per_layer_table(keys, norm.eps)
    layers = tuple(
        Layer(
            dataclasses.replace(
                mixer, kv_layer=source, tied_values=mixer.tied_values and source is None
            ),
            Dense(inner if source is None else wide, function),
            norm,
            post_norms=True,
            per_layer=None if table is None else PerLayerInput(table.size, function),
            scaled=True,
        )
        for mixer, source in zip(mixers, sources, strict=True)
    )
    found = parts.decoder(
        keys,
        layers,
        norm,
        tied=True,
        embedding_factor=parts.hidden_size(keys) ** 0.5,
        logit_softcap=keys.optional_number("final_logit_softcapping", parts.SOFTCAP),
    )
    return dataclasses.replace(found, per_layer=table)


def gelu(keys: Keys) -> Literal["gelu", "gelu_tanh"]:
    """Read the activation of MLPs and per-layer inputs."""
    return "gelu" if parts.activation(keys, parts.GELUS) == "gelu" else "gelu_tanh"


def per_layer_table(keys: Keys, eps: float) -> PerLayerTable | None:
    """Read the embeddings for each layer; None if there are none."""
    vocab = keys.integer("vocab_size_per_layer_input", _TABLE, 262_144)
    size = keys.optional_integer("hidden_size_per_layer_input", _SIZE, 256)
    return PerLayerTable(vocab, size, eps) if size else None


def kv_layers(keys: Keys, kinds: list[str], shared: int) -> list[int | None]:
    """Return for each layer the one whose keys and values it reads: of the last `shared` ones the last of its type.

    Raises:
        ModelFolderError: there is none before them.
    """
    first = len(kinds) - shared
    last = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if missing := set(kinds) - last.keys():
        raise ModelFolderError(
            f"{keys.name('num_kv_shared_layers')} = {shared} of {len(kinds)} layers leaves no layer of type"
            f" {min(missing)} that computes keys and values"
        )
    return [last[kind] if index >= first else None for index, kind in enumerate(kinds)]


def _mixers(keys: Keys, kinds: list[str]) -> list[Attention]:
    """Return the mixer of each layer, as if it computed keys and values."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=4, head_dim=256)
    tied = keys.flag("attention_k_eq_v")
    # Read whatever follows, since one of the two forms has it.
    full_dim = keys.integer("global_head_dim", parts.HEAD_DIM, 512)
    full_kv = keys.optional_integer("num_global_key_value_heads", parts.HEADS)
    stated_layers = keys.inner("per_layer_config")
    window = keys.integer("sliding_window", POSITIONS, 512)
    bias, norm = keys.flag("attention_bias"), parts.rms_norm(keys)
    found = []
    for index, kind in enumerate(kinds):
        is_full = kind == parts.FULL
        size, count = (full_dim, full_kv if tied else None) if is_full else (dim, None)
        if stated_layers is not None:
            stated = stated_layers.inner(str(index)) or Keys({})
            size = stated.integer("head_dim", parts.HEAD_DIM, dim)
            count = stated.optional_integer("num_key_value_heads", parts.HEADS)
            stated.refuse_others()
        count = count or kv_heads
        parts.check_heads(heads, count, size)
        found.append(
            Attention(
                heads,
                count,
                size,
                scale=1.0,
                window=None if is_full else window,
                rotary=read_rotary_of_layer_type(keys, kind, size, _ROTARIES[kind]),
                qk_norm=norm,
                bias=bias,
                output_bias=bias,
                value_norm=True,
                tied_values=tied and is_full,
            )
        )
    return found


def _check_shared(keys: Keys, mixers: list[Attention], sources: list[int | None]) -> None:
    """Check that layers that read the keys and values of another one have key-value heads of the same number and size.

    Raises:
        ModelFolderError: one has others.
    """
    sizes = [(it.num_kv_heads, it.head_dim) for it in mixers]
    for index, source in enumerate(sources):
        if source is not None and sizes[index] != sizes[source]:
            raise ModelFolderError(
                f"{keys.name('per_layer_config')}: layer {index} has key-value heads of {sizes[index]} (number, size),"
                f" but reads those of layer {source}, {sizes[source]}"
            )


def _rewrites(_: Keys) -> dict[str, Rewrite]:
    """Return none: weights of norms are stored as they are."""
    return {}


FAMILY: Final = dataclasses.replace(
    gemma3.FAMILY,
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    network=network,
    tensors=_TENSORS,
    rewrites=_rewrites,
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
)
