"""Reads the parameters of the rotary position embedding."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final, get_args

from msgspec import Meta

from model.errors import ModelFolderError, UnsupportedModelError
from model.families.keys import Keys
from model.json_input import shorten
from model.network.spec import RopeType, Rotary

if TYPE_CHECKING:
    from collections.abc import Mapping

POSITIONS: Final = Meta(ge=1, le=2**24)
_THETA: Final = Meta(ge=2, le=1e12)
_FACTOR: Final = Meta(ge=1, le=1e6)
_NUMBER: Final = Meta(ge=0, le=1e6)
_DIVISOR: Final = Meta(ge=1e-3, le=1e6)
_FREQUENCY: Final = Meta(ge=1e-6, le=1e6)
_SHARE: Final = Meta(gt=0, le=1)
_PROPORTIONAL: Final = "proportional"
_TYPES: Final[Mapping[str, RopeType]] = {it: it for it in get_args(RopeType) if it != _PROPORTIONAL}
"""Those of most families."""


def read_rotary(
    keys: Keys,
    head_dim: int,
    *,
    theta: float = Rotary.theta,
    partial: float | None = None,
    types: Mapping[str, RopeType] = _TYPES,
    absent: Mapping[str, Any] | None = None,
    sections: bool = False,
) -> Rotary:
    """Read the parameters from either form of config.json.

    Args:
        keys: of config.json.
        head_dim: D.
        theta: the default of the base.
        partial: the default of `partial_rotary_factor`, the share of a head's dimensions that rotate; None for a family
            without the key.
        types: the variants of the family by their names.
        absent: the parameters if config.json states none; None for the default variant.
        sections: whether they may divide the pairs of a head into sections for time, height and width; text has the
            same angle in all.

    Raises:
        ModelFolderError: a value is missing, of the wrong type or outside its limits.
        UnsupportedModelError: the variant or a feature is not supported.

    Source: transformers 5, `modeling_rope_utils.py`: precedence of the keys and the defaults.
    """
    rope = rope_parameters(keys, absent)
    if sections:
        rope.accept("mrope_section", "mrope_interleaved")
        types = {**types, "mrope": "default"}
    return _checked(keys, rope, head_dim, theta, partial, types)


def rope_parameters(keys: Keys, absent: Mapping[str, Any] | None = None) -> Keys:
    """Return the object of the parameters, or `absent` if config.json has none."""
    return keys.inner("rope_scaling") or keys.inner("rope_parameters") or Keys(absent or {})


def read_rotary_by_layer_type(
    keys: Keys, head_dim: int, thetas: tuple[float, float | None]
) -> tuple[Rotary, Rotary]:
    """Read the parameters of layers that attend to all tokens, and of layers with a sliding window.

    The form of transformers 5 nests an object for each type of layer. The classic form has only a base for layers with
    a window, `rope_local_base_freq`.

    Args:
        keys: of config.json.
        head_dim: D.
        thetas: the default bases of both; None for the base of layers that attend to all tokens.

    Raises:
        ModelFolderError: a value is missing, of the wrong type or outside its limits.
        UnsupportedModelError: the variant or a feature is not supported.

    Source: transformers 5, Gemma3TextConfig.convert_rope_params_to_dict.
    """
    local_theta = thetas[1] or keys.number("rope_theta", _THETA, thetas[0])
    local_theta = keys.number("rope_local_base_freq", _THETA, local_theta)
    outer = keys.inner("rope_parameters") or Keys({})
    local = outer.inner("sliding_attention") or Keys({})
    rope_type = local.text("rope_type") or local.text("type") or "default"
    if rope_type != "default":
        raise UnsupportedModelError(
            f"rope type {shorten(rope_type)} of sliding_attention is not supported; supported is default"
        )
    rope = keys.inner("rope_scaling") or outer.inner("full_attention") or outer
    return (
        _checked(keys, rope, head_dim, thetas[0]),
        Rotary(theta=local.number("rope_theta", _THETA, local_theta)),
    )


def read_rotary_of_layer_type(
    keys: Keys, kind: str, head_dim: int, absent: Mapping[str, Any]
) -> Rotary:
    """Read the parameters of one type of layer, of a family in which a part of the pairs of a head may rotate.

    Args:
        keys: of config.json.
        kind: the type, a key of `rope_parameters`.
        head_dim: D.
        absent: the parameters if config.json states none.

    Raises:
        ModelFolderError: a value is missing, of the wrong type or outside its limits.
        UnsupportedModelError: the variant or a feature is not supported.

    Source: transformers 5, `modeling_rope_utils.py`, `_compute_proportional_rope_parameters`.
    """
    outer = keys.inner("rope_parameters") or Keys({})
    rope = outer.inner(kind) or Keys(absent, prefix=f"rope_parameters.{kind}.")
    theta = float(absent["rope_theta"])
    if rope.text("rope_type") != _PROPORTIONAL:
        return _checked(keys, rope, head_dim, theta)
    pairs = int(rope.number("partial_rotary_factor", _SHARE, 1.0) * head_dim // 2)
    factor = rope.number("factor", _FACTOR, 1.0)
    theta = rope.number("rope_theta", _THETA, theta)
    rope.refuse_unread()
    return Rotary(_PROPORTIONAL, theta, factor, pairs=pairs)


def _checked(
    keys: Keys,
    rope: Keys,
    head_dim: int,
    theta: float,
    partial: float | None = None,
    types: Mapping[str, RopeType] = _TYPES,
) -> Rotary:
    """Read the parameters from `rope` and, where it lacks them, from `keys`."""
    rotary = _read(keys, rope, theta, types)
    if partial is not None:
        partial = keys.number("partial_rotary_factor", _SHARE, partial)
        dims = int(head_dim * rope.number("partial_rotary_factor", _SHARE, partial))
        if dims % 2 or dims < 4:
            raise ModelFolderError(
                f"partial_rotary_factor must rotate an even number, 4 or more, of the {head_dim} dimensions of a head,"
                f" found {dims}"
            )
        rotary = dataclasses.replace(rotary, dims=None if dims == head_dim else dims)
    rope.refuse_unread()
    half = (rotary.dims or head_dim) // 2
    size = "head_dim" if rotary.dims is None else "rotating dimensions"
    for name in ("short_factor", "long_factor"):
        count = len(getattr(rotary, name))
        if rotary.rope_type == "longrope" and count != half:
            raise ModelFolderError(
                f"{name} of the rope parameters must have {size} / 2 = {half} numbers,"
                f" found {count}"
            )
    return rotary


def _read(keys: Keys, rope: Keys, theta: float, types: Mapping[str, RopeType]) -> Rotary:
    """Read the parameters of a rotation of whole heads."""
    theta = rope.number("rope_theta", _THETA, keys.number("rope_theta", _THETA, theta))
    stated = rope.text("rope_type") or rope.text("type") or "default"
    rope_type = types.get(stated)
    if rope_type is None:
        raise UnsupportedModelError(
            f"rope type {shorten(stated)} is not supported; supported are {', '.join(types)}"
        )
    if rope_type == "default":
        return Rotary(theta=theta)
    context = keys.integer("max_position_embeddings", POSITIONS)
    original = rope.integer("original_max_position_embeddings", POSITIONS, context)
    original = keys.integer("original_max_position_embeddings", POSITIONS, original)
    extended = context / original
    values: dict[str, Any] = {}
    if rope_type in ("linear", "dynamic", "llama3"):
        values["factor"] = rope.number("factor", _FACTOR)
    if rope_type != "linear":
        values["original_max_positions"] = context if rope_type == "dynamic" else original
    if rope_type == "llama3":
        values |= _llama3(rope)
    if rope_type == "yarn":
        values |= _yarn(rope, extended)
    if rope_type == "longrope":
        values |= _longrope(rope, extended, original)
    return Rotary(rope_type, theta, **values)


def _llama3(rope: Keys) -> dict[str, Any]:
    low, high = (rope.number(f"{it}_freq_factor", _FREQUENCY) for it in ("low", "high"))
    if high <= low:
        raise ModelFolderError(
            f"{rope.name('high_freq_factor')} = {high:g} must be greater than low_freq_factor = {low:g}"
        )
    return {"low_freq_factor": low, "high_freq_factor": high}


def _yarn(rope: Keys, extended: float) -> dict[str, Any]:
    """Read YaRN's fields, all of which have defaults.

    Source: YaRN (arXiv 2309.00071) section 3.4, 0.1 ln(s) + 1; `mscale` and `mscale_all_dim` as in
    transformers 5, `modeling_rope_utils.py`, `_compute_yarn_parameters`.
    """
    factor = rope.number("factor", _FACTOR, extended)
    log_factor = math.log(factor) if factor > 1 else 0.0
    scale, scale_all = (rope.number(it, _NUMBER, 0.0) for it in ("mscale", "mscale_all_dim"))
    attention_factor = 0.1 * log_factor + 1.0
    if scale and scale_all:
        attention_factor = (0.1 * scale * log_factor + 1.0) / (0.1 * scale_all * log_factor + 1.0)
    return {
        "factor": factor,
        "attention_factor": rope.number("attention_factor", _NUMBER, attention_factor),
        "beta_fast": rope.number("beta_fast", _NUMBER, 0.0) or Rotary.beta_fast,
        "beta_slow": rope.number("beta_slow", _NUMBER, 0.0) or Rotary.beta_slow,
        "truncate": rope.flag("truncate", default=True),
    }


def _longrope(rope: Keys, extended: float, original: int) -> dict[str, Any]:
    """Read LongRoPE's fields, of which the factors of dimensions are required.

    Source: LongRoPE (arXiv 2402.13753); the defaults as in transformers 5, `modeling_rope_utils.py`,
    `_compute_longrope_parameters`.
    """
    factor = rope.number("factor", _FACTOR, extended)
    extends = factor > 1 and original > 1
    growth = math.log(factor) / math.log(original) if extends else 0.0
    return {
        "factor": factor,
        "attention_factor": rope.number("attention_factor", _NUMBER, math.sqrt(1 + growth)),
        "short_factor": rope.numbers("short_factor", _DIVISOR),
        "long_factor": rope.numbers("long_factor", _DIVISOR),
    }
