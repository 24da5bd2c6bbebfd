"""Decoders of `transformers` that are in no table of ours, as far as their config.json tells without that library.

The front end needs the vocabulary and the context alone. The engine builds the library's modules, which tell the rest
(`model.executors.modules.probe`). This module imports neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from model.errors import UnsupportedModelError
from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.table import FAMILIES, find_architecture
from model.network.spec import Modules, Network

ModelBackend = Literal["tessera", "transformers", "auto"]
NAME: Final = "--model-backend transformers"
HINT: Final = (
    f"{NAME} serves it, more slowly, if the installed library transformers has it as a decoder"
)
"""What to do about an architecture without a family; a clause."""

_CONTEXT: Final = ("n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")
_PARTS: Final = ("text_config", "llm_config", "language_config")
"""Keys of the objects that state the language model of several models."""


def find_family(config: Mapping[str, Any], backend: ModelBackend) -> Family:
    """Return the family of a config.json: a row of `FAMILIES`, or one whose network has `Network.modules`.

    Args:
        config: the content of config.json.
        backend: tessera for a row alone, auto for `transformers` where there is none, transformers for that alone.

    Raises:
        ModelFolderError: the file names no architecture.
        UnsupportedModelError: the architecture is not supported.
    """
    if backend == "transformers":
        return _unlisted(config)
    try:
        return FAMILIES[find_architecture(config)]
    except UnsupportedModelError:
        if backend == "auto":
            return _unlisted(config)
        raise


def _unlisted(config: Mapping[str, Any]) -> Family:
    keys = Keys(config)
    names, model_type = keys.texts("architectures"), keys.text("model_type")
    if model_type is None:
        raise UnsupportedModelError(
            f"model_type is missing, by which {NAME} finds the modules of transformers"
        )
    inner = next((it for it in _PARTS if isinstance(config.get(it), dict)), "")
    return Family(
        names[0] if names else model_type,
        model_type,
        _network,
        part=inner if "vocab_size" not in config else "",
        synonyms=dict.fromkeys(_CONTEXT, "max_position_embeddings"),
    )


def _network(keys: Keys) -> Network:
    for key in ("is_encoder_decoder", "add_cross_attention"):
        keys.require(key, False)
    model_type = keys.text("model_type") or ""
    return Network(keys.integer("vocab_size", parts.VOCAB), 0, (), modules=Modules(model_type))
