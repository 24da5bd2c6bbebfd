"""Parts that families share: sizes, activations, norms, windows of layers, and the network around the layers."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple, TypeAlias

from msgspec import Meta

from model.errors import ModelFolderError, UnsupportedModelError
from model.families.keys import Keys
from model.families.rotary import POSITIONS
from model.families.tensors import Rewrite
from model.json_input import shorten
from model.network.spec import ActivationName, Layer, Network, Norm, Positions, Rotary

Windows: TypeAlias = tuple[int | None, ...]
"""For each layer the tokens that a token attends to, itself included; None for all before it."""

SOFTCAP: Final = Meta(gt=0, le=1e6)
SCALAR: Final = Meta(ge=1, le=65_536)
VOCAB: Final = Meta(ge=1, le=2**21)
_HIDDEN: Final = Meta(ge=1, le=65_536)
INNER: Final = Meta(ge=1, le=2**20)
CONV_WIDTH: Final = Meta(ge=2, le=64)
_INDEX: Final = Meta(ge=0, le=1_023)
_LAYERS: Final = Meta(ge=1, le=1_024)
HEADS: Final = Meta(ge=1, le=1_024)
HEAD_DIM: Final = Meta(ge=1)
_EPS: Final = Meta(ge=0, le=1)
MULTIPLIER: Final = Meta(ge=1e-6, le=1e6)
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"

GELUS: Final = ("gelu_pytorch_tanh", "gelu_new", "gelu")
_ACTIVATIONS: Final[dict[str, ActivationName]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""The activations by their names in config.json."""


def hidden_size(keys: Keys) -> int:
    """Read the elements of the residual stream."""
    return keys.integer("hidden_size", _HIDDEN)


def inner_size(keys: Keys, default: int | None = None) -> int:
    """Read the elements between the matrices of an MLP."""
    return keys.integer("intermediate_size", INNER, default)


def num_layers(keys: Keys) -> int:
    """Read the number of layers."""
    return keys.integer("num_hidden_layers", _LAYERS)


def layer_indices(keys: Keys, key: str) -> list[int] | None:
    """Read the indices of some layers, or None; those of no layer are noted."""
    found, count = keys.optional_integers(key, _INDEX), num_layers(keys)
    if found and (outside := [it for it in found if it >= count]):
        keys.note(f"{key} has {shorten(outside)}, beside the {count} layers; they are ignored")
    return found


def heads(
    keys: Keys, num_kv_heads: int | None = None, head_dim: int | None = None
) -> tuple[int, int, int]:
    """Read the query heads, the key-value heads and the head dim.

    Args:
        keys: of config.json.
        num_kv_heads: the default; None for as many as query heads.
        head_dim: the default; None for the hidden size divided by the query heads.

    Raises:
        ModelFolderError: a number is missing or outside its limits, or they do not fit each other.
    """
    count = keys.integer("num_attention_heads", HEADS)
    kv_count = keys.integer("num_key_value_heads", HEADS, num_kv_heads or count)
    stated = keys.optional_integer("head_dim", HEAD_DIM) or head_dim
    dim = _head_dim(keys, count, stated)
    check_heads(count, kv_count, dim)
    return count, kv_count, dim


def check_heads(count: int, kv_count: int, dim: int) -> None:
    """Check that numbers of heads and the head dim fit each other.

    Raises:
        ModelFolderError: they do not.
    """
    if count % kv_count:
        raise ModelFolderError(
            f"num_attention_heads = {count} must be a multiple of num_key_value_heads = {kv_count}"
        )
    if dim % 2 or not 4 <= dim <= 1_024:
        raise ModelFolderError(f"head_dim must be an even number from 4 to 1024, found {dim}")


def equal_heads(keys: Keys) -> tuple[int, int, int]:
    """Read the heads, as `heads` does, of a family that has neither fewer key-value heads nor another head dim."""
    count = keys.integer("num_attention_heads", HEADS)
    dim = _head_dim(keys, count)
    check_heads(count, count, dim)
    return count, count, dim


def _head_dim(keys: Keys, num_heads: int, stated: int | None = None) -> int:
    hidden = hidden_size(keys)
    if stated is None and hidden % num_heads:
        raise ModelFolderError(
            f"{keys.name('hidden_size')} = {hidden} must be a multiple of"
            f" {keys.name('num_attention_heads')} = {num_heads} where head_dim is not given"
        )
    return hidden // num_heads if stated is None else stated


def activation(keys: Keys, names: tuple[str, ...] = ("silu", "swish")) -> ActivationName:
    """Read the activation of the MLPs.

    Args:
        keys: of config.json.
        names: those that models of the family have, the default first.

    Raises:
        UnsupportedModelError: it is another one.
    """
    keys.require("hidden_act", *names)
    return _ACTIVATIONS[keys.text("hidden_act") or names[0]]


def rms_norm(keys: Keys, default_eps: float = Norm.eps, *, float32: bool = False) -> Norm:
    """Read the RMS norms; `float32` as in `Norm`."""
    return Norm(keys.number("rms_norm_eps", _EPS, default_eps), float32=float32)


def layer_norm(keys: Keys, default_eps: float = 1e-5, *, bias: bool = True) -> Norm:
    """Read the layer norms, which have biases or none."""
    return Norm(keys.number("layer_norm_eps", _EPS, default_eps), "layer", bias=bias)


class Multipliers(NamedTuple):
    """Factors in a Llama, which loading folds into its weights.

    Embeddings are multiplied by e, and what a layer adds to the stream by r. A norm does not depend on the scale of the
    stream, so the stream divided by e has the embeddings unchanged, r / e in the weights that add to it, and eps / e^2
    in the norms. The weight of the last norm multiplies the logits.

    Attributes:
        embedding: e.
        residual: r.
        logits: of the logits.
    """

    embedding: float
    residual: float
    logits: float

    def norm(self, norm: Norm) -> Norm:
        """Return the norm of the stream divided by e."""
        return dataclasses.replace(norm, eps=norm.eps / self.embedding**2)

    def rewrites(self) -> dict[str, Rewrite]:
        """Return what loading changes."""
        added = Rewrite(self.residual / self.embedding)
        return {
            **dict.fromkeys(("output", "mixed", "down"), added),
            "norm": Rewrite(self.logits),
        }


def same_windows(keys: Keys, window: int | None = None) -> Windows:
    """Return the window of every layer.

    Raises:
        UnsupportedModelError: `layer_types` states others.
    """
    windows = (window,) * num_layers(keys)
    kind = FULL if window is None else SLIDING
    if {*layer_types(keys)} - {kind}:
        raise UnsupportedModelError(
            f"layer_types that differ from {kind} everywhere are not supported with this architecture"
        )
    return windows


def windows_from_layer(keys: Keys) -> Windows:
    """Read the windows of Qwen: if they are enabled, those of all layers from a certain one on.

    Source: transformers 5, `Qwen2Config.__post_init__`.
    """
    window = keys.optional_integer("sliding_window", POSITIONS, 4096)
    window = window if keys.flag("use_sliding_window") else None
    first = keys.integer("max_window_layers", Meta(ge=0), 28)
    return stated_windows(keys, window, [layer >= first for layer in range(num_layers(keys))])


def windows_by_pattern(keys: Keys, pattern: int) -> Windows:
    """Read the windows of Gemma: those of all layers but each one whose number, from 1, is a multiple of `pattern`.

    Args:
        keys: of config.json.
        pattern: the default of `sliding_window_pattern`.

    Source: transformers 5, `Gemma3TextConfig.__post_init__`.
    """
    window = keys.optional_integer("sliding_window", POSITIONS, 4096)
    pattern = keys.integer("sliding_window_pattern", Meta(ge=1), pattern)
    return stated_windows(
        keys, window, [(layer + 1) % pattern > 0 for layer in range(num_layers(keys))]
    )


def stated_windows(keys: Keys, window: int | None, has_window: list[bool]) -> Windows:
    """Return the windows that `layer_types` states.

    Args:
        keys: of config.json.
        window: of the layers that have one; None if none has.
        has_window: which layers have it if `layer_types` is absent.

    Raises:
        ModelFolderError: `layer_types` names windows, but there is none.
        UnsupportedModelError: `layer_types` names an unknown type.
    """
    if stated := layer_types(keys):
        has_window = [kind == SLIDING for kind in stated]
        if window is None and any(has_window):
            raise ModelFolderError(
                "layer_types names sliding_attention, but sliding_window is missing or"
                " use_sliding_window is false"
            )
    return tuple(window if has else None for has in has_window)


def with_windows(layer: Layer, windows: Windows, local: Rotary | None = None) -> tuple[Layer, ...]:
    """Return layers that differ in their windows.

    Args:
        layer: one that attends to all tokens.
        windows: of each layer.
        local: the rotary embedding of layers with a window; None for that of `layer`.
    """
    mixer = layer.mixer
    mixers = (
        mixer
        if window is None
        else dataclasses.replace(mixer, window=window, rotary=local or mixer.rotary)
        for window in windows
    )
    return tuple(dataclasses.replace(layer, mixer=it) for it in mixers)


def layer_types(keys: Keys, kinds: tuple[str, ...] = (FULL, SLIDING)) -> list[str]:
    """Read `layer_types`; empty if it is absent.

    Args:
        keys: of config.json.
        kinds: the types that the family has.

    Raises:
        ModelFolderError: it is not a list of as many types as layers.
        UnsupportedModelError: a type is unknown.
    """
    stated, count = keys.texts("layer_types"), num_layers(keys)
    if stated is None:
        return []
    if len(stated) != count:
        raise ModelFolderError(
            f"layer_types must be a list of {keys.name('num_hidden_layers')} = {count} entries,"
            f" found {shorten(stated)}"
        )
    for kind in stated:
        if kind not in kinds:
            raise UnsupportedModelError(
                f"layer type {shorten(kind)} is not supported; supported are {', '.join(kinds)}"
            )
    return stated


def decoder(
    keys: Keys,
    layers: tuple[Layer, ...],
    norm: Norm,
    *,
    tied: bool = False,
    embedding_factor: float = 1.0,
    positions: Positions | None = None,
    logit_softcap: float | None = None,
    head_bias: bool = False,
) -> Network:
    """Return the network around layers; `tied` is the default of `tie_word_embeddings`."""
    return Network(
        keys.integer("vocab_size", VOCAB),
        hidden_size(keys),
        layers,
        norm,
        embedding_factor,
        positions,
        logit_softcap,
        keys.flag("tie_word_embeddings", default=tied),
        head_bias,
    )
