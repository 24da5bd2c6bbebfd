"""Mamba-2 layers as config.json of several families states them, with keys that begin with `mamba_`."""

from __future__ import annotations

from typing import Final

from msgspec import Meta

from model.errors import ModelFolderError
from model.families import parts
from model.families.keys import Keys
from model.json_input import shorten
from model.network.mixers import Mamba2

_HEADS: Final = Meta(ge=1, le=4_096)
_DIM: Final = Meta(ge=1, le=1_024)
_STEP: Final = Meta(ge=0)
_AUTO: Final = "auto"
LINEAR: Final = ("mamba", "linear_attention")
"""Types of layers with Mamba-2: those of files, and of transformers 5."""
ATTENTION: Final = ("attention", parts.FULL)
"""Types of layers with attention, likewise."""


def read_mamba2(
    keys: Keys,
    eps: float | None,
    *,
    inner: int | None = None,
    norm_before_gate: bool = False,
    output_bias: bool | None = None,
) -> Mamba2:
    """Read the mixer.

    Args:
        keys: of config.json.
        eps: of its norm; None for no norm.
        inner: elements of a token's result; None for `mamba_expand` times the hidden size.
        norm_before_gate: as of `Mamba2`.
        output_bias: as of `Mamba2`; None if it has one where the other product has one.

    Raises:
        ModelFolderError: a value is missing or outside its limits, or values do not fit each other.
    """
    expand = keys.integer("mamba_expand", _DIM, 2)
    inner = expand * parts.hidden_size(keys) if inner is None else inner
    heads = keys.integer("mamba_n_heads", _HEADS, 128)
    groups = keys.integer("mamba_n_groups", _HEADS, 1)
    stated = keys.text_or_integer("mamba_d_head", _DIM, _AUTO)
    if isinstance(stated, str) and stated != _AUTO:
        raise ModelFolderError(
            f"{keys.name('mamba_d_head')} must be a whole number or 'auto', found {shorten(stated)}"
        )
    dim = inner // heads if isinstance(stated, str) else stated
    if heads * dim != inner:
        raise ModelFolderError(
            f"mamba_n_heads = {heads} of mamba_d_head = {dim} elements must have {inner} elements together"
        )
    if heads % groups:
        raise ModelFolderError(
            f"mamba_n_heads = {heads} must be a multiple of mamba_n_groups = {groups}"
        )
    bias = keys.flag("mamba_proj_bias")
    return Mamba2(
        heads,
        dim,
        keys.integer("mamba_d_state", _DIM, 256),
        groups,
        keys.integer("mamba_d_conv", parts.CONV_WIDTH, 4),
        eps,
        norm_before_gate=norm_before_gate,
        dt_limits=keys.bounds("time_step_limit", _STEP) or Mamba2.dt_limits,
        conv_bias=keys.flag("mamba_conv_bias", default=True),
        bias=bias,
        output_bias=bias if output_bias is None else output_bias,
    )
