"""Reads what files beside tokenizer.json say of tokens.

They are tokenizer_config.json, special_tokens_map.json and added_tokens.json. Checkpoints state the same facts in
different ones, by the version of the library that wrote them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from model.errors import ModelError
from model.json_input import read_json_object, shorten

CONFIG: Final = "tokenizer_config.json"
MAP: Final = "special_tokens_map.json"
ADDED: Final = "added_tokens.json"
MAX_BYTES: Final = 128 << 20
_DECODER: Final = "added_tokens_decoder"
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
_ROLES: Final = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""In the order in which transformers adds those that are no tokens yet."""


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """What the files say.

    Attributes:
        config: the content of tokenizer_config.json, with what only special_tokens_map.json states.
        named: by the names of roles, such as `eos_token`, the text that each file states.
        special: the texts of all special tokens that are named.
        added: `added_tokens_decoder`: by id, what `tokenizers.AddedToken` takes.
        ids: the content of added_tokens.json: ids by text.
    """

    config: Mapping[str, Any]
    named: Mapping[str, Mapping[str, str]]
    special: tuple[str, ...]
    added: Mapping[Any, Any]
    ids: Mapping[str, int]


def read_tokenizer_files(folder: Path, error: type[ModelError]) -> TokenizerFiles:
    """Read the files of a checkpoint, all of which may be absent.

    Args:
        folder: the checkpoint.
        error: type of the errors.

    Raises:
        ModelError: of the type `error`: a file is damaged, or a value is of the wrong type.
    """
    contents = {
        name: read_json_object(folder, name, MAX_BYTES, error) or {} for name in (CONFIG, MAP)
    }
    for name, content in contents.items():
        _check(content, folder / name, error)
    config, mapped = contents[CONFIG], contents[MAP]
    # As in transformers 5, where the map is older than a configuration with `added_tokens_decoder`.
    first, second = (config, mapped) if _DECODER in config else (mapped, config)
    stated = {key: it for key, it in first.items() if it is not None}
    merged = {**config, **{key: it for key, it in mapped.items() if it is not None}, **stated}
    for key in _LISTS:
        both = [it[key] for it in (first, second) if it.get(key)]
        if len(both) == 2 and all(isinstance(it, list) for it in both):
            merged[key] = [*both[0], *(it for it in both[1] if it not in both[0])]
    named: dict[str, dict[str, str]] = {}
    for name, content in contents.items():
        for role, value in content.items():
            if role.endswith("_token") and (text := token_text(value)):
                named.setdefault(role, {})[name] = text
    added = config.get(_DECODER) or {}
    if not isinstance(added, dict):
        raise error(f"{folder / CONFIG}: {_DECODER} is not an object")
    return TokenizerFiles(
        merged,
        named,
        tuple(dict.fromkeys(_special(merged, named))),
        added,
        _read_ids(folder, error),
    )


def token_text(value: object) -> str | None:
    """Return the text of a token that is stated as a text or as an `AddedToken`; None for anything else."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special(merged: Mapping[str, Any], named: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield the texts of special tokens: those with a role, and further ones."""
    for role in dict.fromkeys((*_ROLES, *named)):
        if text := token_text(merged.get(role)):
            yield text
        yield from named.get(role, {}).values()
    for key in _LISTS:
        value = merged.get(key)
        for it in value.values() if isinstance(value, dict) else value or ():
            for text in it if isinstance(it, list) else [it]:
                if found := token_text(text):
                    yield found


def _check(content: Mapping[str, Any], file: Path, error: type[ModelError]) -> None:
    for role in ("bos_token", "eos_token"):
        if (value := content.get(role)) is not None and token_text(value) is None:
            raise error(f"{file}: {role} is {shorten(value)}, not a text")
    for key in _LISTS:
        if not isinstance(value := content.get(key), list | dict | None):
            raise error(f"{file}: {key} is {shorten(value)}, neither a list nor an object")


def _read_ids(folder: Path, error: type[ModelError]) -> dict[str, int]:
    ids = read_json_object(folder, ADDED, MAX_BYTES, error) or {}
    for text, token_id in ids.items():
        if type(token_id) is not int or token_id < 0:
            raise error(
                f"{folder / ADDED}: {text!r} has the id {shorten(token_id)}, not a token id"
            )
    return ids
