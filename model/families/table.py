"""The table of the supported families, and the look-up of the one that a config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from model.errors import ModelFolderError, UnsupportedModelError
from model.families import (
    cohere,
    cohere2,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gemma3_multimodal,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gptj,
    granite,
    llama,
    mistral,
    olmo2,
    opt,
    phi,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    stablelm,
    starcoder2,
)
from model.families.family import Family
from model.families.keys import Keys
from model.json_input import shorten

_FILES: Final = (
    llama,
    mistral,
    qwen2,
    qwen3,
    gemma,
    gemma2,
    gemma3,
    gemma3_multimodal,
    gpt2,
    opt,
    granite,
    starcoder2,
    phi3,
    smollm3,
    stablelm,
    olmo2,
    cohere,
    cohere2,
    falcon,
    gpt_bigcode,
    gpt_neox,
    gptj,
    phi,
)
FAMILIES: Final[Mapping[str, Family]] = {file.FAMILY.architecture: file.FAMILY for file in _FILES}
"""Supported families by architecture."""


def find_architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture that a config.json names, a key of `FAMILIES`.

    Raises:
        ModelFolderError: it names no architecture.
        UnsupportedModelError: the architecture is not supported.
    """
    keys = Keys(config)
    names, model_type = keys.texts("architectures"), keys.text("model_type")
    if not names and model_type is None:
        raise ModelFolderError("architectures and model_type are both missing")
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    name = names[0] if names else by_type.get(str(model_type), str(model_type))
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
