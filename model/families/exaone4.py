"""EXAONE 4: Qwen3 with norms after attention and MLP; hybrid models have windows, and elsewhere no rotation."""

from __future__ import annotations

import dataclasses
from typing import Final

from msgspec import Meta

from model.errors import ModelFolderError
from model.families import olmo2, parts
from model.families.keys import Keys
from model.families.rotary import POSITIONS, read_rotary
from model.json_input import shorten
from model.network.spec import Attention, Dense, Layer, Network

_PATTERN: Final = "sliding_window_pattern"


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys, num_kv_heads=32)
    norm = parts.rms_norm(keys, 1e-5)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=read_rotary(keys, dim), qk_norm=norm)
    mlp = Dense(parts.inner_size(keys), parts.activation(keys))
    layer = Layer(mixer, mlp, norm, pre_norms=False, post_norms=True)
    window = keys.optional_integer("sliding_window", POSITIONS, 4096)
    windows = parts.stated_windows(keys, window, _has_window(keys, is_hybrid=window is not None))
    layers = parts.with_windows(layer, windows)
    if window is not None:
        layers = tuple(
            it if has is not None else dataclasses.replace(it, mixer=_unrotated(it.mixer))
            for it, has in zip(layers, windows, strict=True)
        )
    return parts.decoder(keys, layers, norm)


def _has_window(keys: Keys, *, is_hybrid: bool) -> list[bool]:
    """Read the pattern of the layers: a number as Gemma's, or a letter for each, L for one with a window."""
    count, pattern = parts.num_layers(keys), keys.text_or_integer(_PATTERN, Meta(ge=0), 4)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise ModelFolderError(
                f"{_PATTERN} must be a number or letters L and G, found {shorten(pattern)}"
            )
        return [is_hybrid and pattern[layer % len(pattern)] == "L" for layer in range(count)]
    return [is_hybrid and bool(pattern and (layer + 1) % pattern) for layer in range(count)]


def _unrotated(mixer: Attention) -> Attention:
    return dataclasses.replace(mixer, rotary=None)


FAMILY: Final = dataclasses.replace(
    olmo2.FAMILY,
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    network=network,
    defaults={},
)
