"""SmolLM3: Llama, but every fourth layer has no rotary embedding."""

from __future__ import annotations

import dataclasses
from typing import Final

from msgspec import Meta

from model.errors import ModelFolderError
from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import POSITIONS, read_rotary
from model.network.spec import Attention, Dense, Layer, Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys)
    bias, norm = keys.flag("attention_bias"), parts.rms_norm(keys)
    rotary = read_rotary(keys, dim, theta=2_000_000.0)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias)
    mlp = Dense(parts.inner_size(keys), parts.activation(keys), bias=keys.flag("mlp_bias"))
    rotates = _rotates(keys)
    window = keys.optional_integer("sliding_window", POSITIONS)
    window = window if keys.flag("use_sliding_window") else None
    windows = parts.stated_windows(keys, window, [not it for it in rotates])
    layers = tuple(
        layer if it else dataclasses.replace(layer, mixer=_unrotated(layer.mixer))
        for layer, it in zip(
            parts.with_windows(Layer(mixer, mlp, norm), windows), rotates, strict=True
        )
    )
    return parts.decoder(keys, layers, norm, tied=True)


def _rotates(keys: Keys) -> list[bool]:
    """Return for each layer whether it has a rotary embedding."""
    count = parts.num_layers(keys)
    interval = keys.integer("no_rope_layer_interval", Meta(ge=1), 4)
    stated = keys.optional_integers("no_rope_layers", Meta(ge=0, le=1))
    if stated is None:
        return [(layer + 1) % interval > 0 for layer in range(count)]
    if len(stated) < count:
        raise ModelFolderError(
            f"no_rope_layers must have an entry for each of {count} layers, found {len(stated)}"
        )
    return [bool(it) for it in stated[:count]]


def _unrotated(mixer: Attention) -> Attention:
    return dataclasses.replace(mixer, rotary=None)


FAMILY: Final = Family(
    "SmolLM3ForCausalLM", "smollm3", network, defaults={"num_key_value_heads": 4}
)
