"""The table of the supported families, and the look-up of the one that a config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from model.errors import ModelFolderError, UnsupportedModelError
from model.families import (
    apertus,
    arcee,
    bamba,
    cohere,
    cohere2,
    cwm,
    ernie4_5,
    exaone,
    exaone4,
    falcon,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma3_multimodal,
    gemma3n,
    gemma3n_multimodal,
    gemma4,
    gemma4_multimodal,
    gemma4_unified,
    gemma4_unified_multimodal,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gptj,
    granite,
    granite4,
    helium,
    hunyuan_dense,
    internlm3,
    lfm2,
    lfm2_vl,
    llama,
    llama_names,
    minicpm,
    ministral,
    ministral3,
    mistral,
    mistral3,
    nemotron,
    olmo2,
    olmo3,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_5_text,
    qwen3_vl,
    seed_oss,
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
    gemma3n,
    gemma3n_multimodal,
    gemma4,
    gemma4_multimodal,
    gemma4_unified,
    gemma4_unified_multimodal,
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
    qwen3_vl,
    qwen2_5_vl,
    qwen2_vl,
    mistral3,
    ministral3,
    ministral,
    olmo3,
    exaone4,
    exaone,
    ernie4_5,
    seed_oss,
    arcee,
    hunyuan_dense,
    minicpm,
    apertus,
    helium,
    nemotron,
    internlm3,
    cwm,
    qwen3_5,
    qwen3_5_text,
    lfm2,
    lfm2_vl,
    granite4,
    falcon_h1,
    bamba,
)
FAMILIES: Final[Mapping[str, Family]] = {
    family.architecture: family
    for family in (*(file.FAMILY for file in _FILES), *llama_names.FAMILIES)
}
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
    by_type = {family.model_type: family for family in FAMILIES.values()}
    named = by_type.get(str(model_type))
    if named is not None and (not names or names[0] in named.also):
        return named.architecture
    name = names[0] if names else str(model_type)
    if name not in FAMILIES:
        others = (
            it.architecture for it in FAMILIES.values() if model_type is None and name in it.also
        )
        if (other := next(others, None)) is not None:
            return other
        raise UnsupportedModelError(
            f"architecture {shorten(name)} is not supported; supported are {', '.join(FAMILIES)}"
        )
    if model_type not in (None, FAMILIES[name].model_type):
        raise UnsupportedModelError(
            f"architecture {name} with model_type {shorten(model_type)} is not supported;"
            f" {name} goes with model_type '{FAMILIES[name].model_type}'"
        )
    return name
