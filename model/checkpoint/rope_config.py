"""The parameters of the rotary position embedding, as `config.json` states them."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, get_args

import msgspec
from msgspec import Meta

from model.errors import ModelFolderError, UnsupportedModelError
from model.json_input import Harmless, convert, refuse, shorten
from model.network.spec import RopeType, Rotary

Positions = Annotated[int, Meta(ge=1, le=2**24)]
_Theta = Annotated[float, Meta(ge=2, le=1e12)]
_Number = Annotated[float, Meta(ge=0, le=1e6)]
_Divisor = Annotated[float, Meta(ge=1e-3, le=1e6)]
_Frequency = Annotated[float, Meta(ge=1e-6, le=1e6)]

_FIELDS: Final[dict[RopeType, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Fields of `Rotary` that config.json holds under the same name, by variant.

YaRN's have defaults, as have the first two of LongRoPE; the others are required.
"""

_WITH_ORIGINAL: Final = ("yarn", "longrope", "llama3")
"""Variants whose original context is a key of its own."""

# transformers nests one object for each layer type if their parameters differ, as only `by_layer_type` supports.
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
_HARMLESS: Final[Harmless] = (
    ((), (*_LAYER_TYPES, "mrope_section")),
    ((1,), ("partial_rotary_factor",)),
)


def read_rotary(config: dict[str, Any], max_positions: int) -> Rotary:
    """Read the parameters from either form of `config.json`.

    Args:
        config: the content of config.json.
        max_positions: tokens of the context that it states.

    Raises:
        ModelFolderError: a value is missing, of the wrong type or outside its limits.
        UnsupportedModelError: the variant or a feature is not supported.

    Source: transformers 5, `modeling_rope_utils.py`: precedence of the keys and the defaults.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    stated = config.get(name) or {}
    if not isinstance(stated, dict):
        raise ModelFolderError(f"{name} must be an object, found {shorten(stated)}")
    refuse(stated, _HARMLESS, f"{name}.")
    outer, rope = convert(config, _OuterKeys), convert(stated, _RopeKeys, prefix=f"{name}.")
    rope_type = _supported(rope.rope_type or rope.type or "default")
    original = (
        outer.original_max_position_embeddings
        or rope.original_max_position_embeddings
        or max_positions
    )
    values = {field: getattr(rope, field) for field in _FIELDS[rope_type]}
    if rope_type == "yarn":
        values |= _yarn(rope, max_positions / original)
    if rope_type == "longrope":
        values |= _longrope(rope, max_positions / original, original)
    if missing := [field for field, value in values.items() if value is None]:
        raise ModelFolderError(f"{name}.{missing[0]} is missing")
    if rope_type == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise ModelFolderError(
            f"{name}.high_freq_factor = {values['high_freq_factor']:g} must be greater than"
            f" low_freq_factor = {values['low_freq_factor']:g}"
        )
    if rope_type in ("yarn", "longrope", "llama3", "dynamic"):
        values["original_max_positions"] = max_positions if rope_type == "dynamic" else original
    return Rotary(rope_type, rope.rope_theta or outer.rope_theta or Rotary.theta, **values)


def read_rotary_by_layer_type(
    config: dict[str, Any], max_positions: int, thetas: tuple[float, float]
) -> tuple[Rotary, Rotary]:
    """Read the parameters of layers that attend to all tokens, and of layers with a sliding window.

    Args:
        config: the content of config.json.
        max_positions: tokens of the context that it states.
        thetas: the default bases of both.

    Raises:
        ModelFolderError: a value is missing, of the wrong type or outside its limits.
        UnsupportedModelError: the variant or a feature is not supported.

    Source: transformers 5, Gemma3TextConfig.convert_rope_params_to_dict.
    """
    local_theta = convert(config, _LocalKeys).rope_local_base_freq or thetas[1]
    stated = {"rope_theta": thetas[0]} | {k: v for k, v in config.items() if v is not None}
    local: dict[str, Any] = {"rope_theta": local_theta}
    nested = stated.get("rope_parameters")
    if isinstance(nested, dict) and any(kind in nested for kind in _LAYER_TYPES):
        parts = [nested.get(kind) or {} for kind in _LAYER_TYPES]
        stated, local = (
            outer | {"rope_parameters": part}
            for outer, part in zip((stated, local), parts, strict=True)
        )
    found = read_rotary(local, max_positions)
    if found.rope_type != "default":
        raise UnsupportedModelError(
            f"rope type {shorten(found.rope_type)} of sliding_attention is not supported; supported is default"
        )
    return read_rotary(stated, max_positions), found


def rotary_to_dict(rotary: Rotary) -> dict[str, Any] | None:
    """Return the value of `rope_scaling` in config.json."""
    if rotary.rope_type == "default":
        return None
    names = ("rope_type", *_FIELDS[rotary.rope_type])
    values = {name: getattr(rotary, name) for name in names}
    lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
    original = {"original_max_position_embeddings": rotary.original_max_positions}
    return values | lists | (original if rotary.rope_type in _WITH_ORIGINAL else {})


class _LocalKeys(msgspec.Struct):
    rope_local_base_freq: _Theta | None = None


class _OuterKeys(msgspec.Struct):
    rope_theta: _Theta | None = None
    original_max_position_embeddings: Positions | None = None


class _RopeKeys(_OuterKeys):
    rope_type: str | None = None
    type: str | None = None
    factor: Annotated[float, Meta(ge=1, le=1e6)] | None = None
    low_freq_factor: _Frequency | None = None
    high_freq_factor: _Frequency | None = None
    attention_factor: _Number | None = None
    mscale: _Number | None = None
    mscale_all_dim: _Number | None = None
    beta_fast: _Number | None = None
    beta_slow: _Number | None = None
    truncate: bool | None = None
    short_factor: tuple[_Divisor, ...] | None = None
    long_factor: tuple[_Divisor, ...] | None = None


def _supported(rope_type: str) -> RopeType:
    types: tuple[RopeType, ...] = get_args(RopeType)
    for supported in types:
        if rope_type == supported:
            return supported
    raise UnsupportedModelError(
        f"rope type {shorten(rope_type)} is not supported; supported are {', '.join(types)}"
    )


def _yarn(rope: _RopeKeys, extension: float) -> dict[str, Any]:
    """Return YaRN's fields, with defaults for absent ones.

    Source: YaRN (arXiv 2309.00071) section 3.4, 0.1 ln(s) + 1; `mscale` and `mscale_all_dim` as in
    transformers 5, `modeling_rope_utils.py`, `_compute_yarn_parameters`.
    """
    factor = rope.factor or extension
    log_factor = math.log(factor) if factor > 1 else 0.0
    attention_factor = rope.attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * log_factor + 1.0
        if rope.mscale and rope.mscale_all_dim:
            attention_factor = (0.1 * rope.mscale * log_factor + 1.0) / (
                0.1 * rope.mscale_all_dim * log_factor + 1.0
            )
    return {
        "factor": factor,
        "attention_factor": attention_factor,
        "beta_fast": rope.beta_fast or 32.0,
        "beta_slow": rope.beta_slow or 1.0,
        "truncate": rope.truncate is not False,
    }


def _longrope(rope: _RopeKeys, extension: float, original: int) -> dict[str, Any]:
    """Return LongRoPE's fields, with defaults for the absent ones that have any.

    Source: LongRoPE (arXiv 2402.13753); the defaults as in transformers 5, `modeling_rope_utils.py`,
    `_compute_longrope_parameters`.
    """
    factor = rope.factor or extension
    attention_factor = rope.attention_factor
    if attention_factor is None:
        extends = factor > 1 and original > 1
        growth = math.log(factor) / math.log(original) if extends else 0.0
        attention_factor = math.sqrt(1 + growth)
    return {"factor": factor, "attention_factor": attention_factor}
