"""The language model of Mistral Small 3.1 and of Ministral 3, for text alone; the image encoder is not loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from model.errors import UnsupportedModelError
from model.families import ministral3, mistral
from model.families.family import Family
from model.families.keys import Keys
from model.families.tensors import LLAMA
from model.families.wrapped import wrapped_tensors
from model.json_input import shorten
from model.network.spec import Network

_LANGUAGE_MODELS: Final[Mapping[str, Callable[[Keys], Network]]] = {
    it.FAMILY.model_type: it.network for it in (mistral, ministral3)
}


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    kind = keys.text("model_type") or mistral.FAMILY.model_type
    if kind not in _LANGUAGE_MODELS:
        raise UnsupportedModelError(
            f"{keys.name('model_type')} = {shorten(kind)} is not supported; supported are"
            f" {', '.join(_LANGUAGE_MODELS)}"
        )
    return _LANGUAGE_MODELS[kind](keys)


FAMILY: Final = Family(
    "Mistral3ForConditionalGeneration",
    "mistral3",
    network,
    wrapped_tensors(LLAMA),
    part="text_config",
)
