"""Model families: the properties that an architecture has beyond its `config.json`.

To add a Llama-like family, add an entry to `FAMILIES`. Tensor names that differ from Llama's belong in
`model.checkpoint.tensor_names`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta

from model.errors import ModelFolderError, UnsupportedModelError
from model.json_input import convert, shorten

LayerType = Literal["full_attention", "sliding_attention"]


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        model_type: the value of the key `model_type` for this architecture.
        windows: which layers have a sliding window: "none", "all", or "by layer", as the keys `use_sliding_window`,
            `max_window_layers` and `layer_types` state.
        fixed: fields of `ModelConfig` that the architecture determines, regardless of config.json.
        defaults: values of absent keys. They equal the defaults of the family's configuration class in transformers,
            because files omit values that equal them.
    """

    model_type: str
    windows: Literal["none", "all", "by layer"]
    fixed: dict[str, bool] = dataclasses.field(default_factory=dict)
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)


_NO_BIAS: Final = {"attention_bias": False, "attention_output_bias": False, "mlp_bias": False}
_WINDOW: Final = {"sliding_window": 4096}

FAMILIES: Final = {
    "LlamaForCausalLM": Family("llama", "none"),
    "MistralForCausalLM": Family("mistral", "all", _NO_BIAS, _WINDOW),
    "Qwen2ForCausalLM": Family("qwen2", "by layer", _NO_BIAS | {"attention_bias": True}, _WINDOW),
    "Qwen3ForCausalLM": Family(
        "qwen3", "by layer", {"mlp_bias": False, "qk_norm": True}, _WINDOW | {"head_dim": 128}
    ),
}
"""Supported families by architecture name."""


@dataclasses.dataclass
class _Names:
    architectures: list[str] | None = None
    model_type: str | None = None


def find_architecture(config: dict[str, Any]) -> str:
    """Return the architecture that `config.json` names, a key of `FAMILIES`.

    Raises:
        ModelFolderError: it names no architecture.
        UnsupportedModelError: the architecture is not supported.
    """
    names = convert(config, _Names)
    model_type = names.model_type
    if not names.architectures and model_type is None:
        raise ModelFolderError("architectures and model_type are both missing")
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    name = (
        names.architectures[0] if names.architectures else by_type.get(model_type or "", model_type)
    )
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {shorten(name)} is not supported; supported are {', '.join(FAMILIES)}"
        )
    if model_type not in (None, FAMILIES[name].model_type):
        raise UnsupportedModelError(
            f"architecture {name} with model_type {shorten(model_type)} is not supported;"
            f" {name} goes with model_type '{FAMILIES[name].model_type}'"
        )
    return name


@dataclasses.dataclass
class _WindowKeys:
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Meta(ge=0)] | None = None
    layer_types: list[str] | None = None


def layer_windows(
    config: dict[str, Any], family: Family, window: int | None, num_layers: int
) -> tuple[int | None, tuple[LayerType, ...]]:
    """Determine which layers have the sliding window.

    Args:
        config: the content of config.json.
        family: the family of its architecture.
        window: the value of `sliding_window` there, or the family's default.
        num_layers: number of layers of the model.

    Returns:
        The window in tokens, None if no layer has it, and the type of each layer.

    Raises:
        ModelFolderError: a value is of the wrong type or contradicts another one.
        UnsupportedModelError: the family does not support these windows or layer types.

    Source: transformers 5, `__post_init__` of MistralConfig, Qwen2Config and Qwen3Config.
    """
    keys, first = convert(config, _WindowKeys), 0
    if family.windows == "none" and window is not None:
        raise UnsupportedModelError(
            f"sliding_window = {window} is not supported with model_type '{family.model_type}';"
            " MistralForCausalLM is the Llama architecture with a sliding window"
        )
    if family.windows == "by layer":
        window = window if keys.use_sliding_window else None
        first = 28 if keys.max_window_layers is None else keys.max_window_layers
    types: tuple[LayerType, ...] = tuple(
        "sliding_attention" if window is not None and layer >= first else "full_attention"
        for layer in range(num_layers)
    )
    if keys.layer_types is not None:
        types = _stated_types(keys.layer_types, family, types)
    if "sliding_attention" not in types:
        return None, types
    if window is None:
        raise ModelFolderError(
            "layer_types names sliding_attention, but sliding_window is missing or"
            " use_sliding_window is false"
        )
    return window, types


def _stated_types(
    stated: list[str], family: Family, derived: tuple[LayerType, ...]
) -> tuple[LayerType, ...]:
    if len(stated) != len(derived):
        raise ModelFolderError(
            f"layer_types must be a list of num_hidden_layers = {len(derived)} entries,"
            f" found {shorten(stated)}"
        )
    types: tuple[LayerType, ...] = get_args(LayerType)
    if unknown := [kind for kind in stated if kind not in types]:
        raise UnsupportedModelError(
            f"layer type {shorten(unknown[0])} is not supported; supported are {', '.join(types)}"
        )
    if family.windows != "by layer" and tuple(stated) != derived:
        raise UnsupportedModelError(
            f"layer_types that differ from {derived[0]} everywhere are not supported"
            f" with model_type '{family.model_type}'"
        )
    return tuple(types[types.index(kind)] for kind in stated)
