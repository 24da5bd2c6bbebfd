"""Reads the chat templates of a checkpoint, and the names of its special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from model.checkpoint_files import read_text
from model.errors import ChatTemplateError
from model.files import read_given
from model.json_input import read_json_object

DEFAULT: Final = "default"
"""The name of the template for conversations without tools."""
_MAX_CONFIG_BYTES = 128 << 20
_MAX_TEMPLATE_BYTES = 4 << 20
_MOST_TEMPLATES = 32
_MORE: Final = "additional_chat_templates"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`; nothing if there is no such file.

    Raises:
        ChatTemplateError: the file is damaged.
    """
    name = "tokenizer_config.json"
    return read_json_object(folder, name, _MAX_CONFIG_BYTES, ChatTemplateError) or {}


def find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a checkpoint by name; files take precedence, as in `transformers`.

    Args:
        folder: the checkpoint. Its templates are in `chat_template.jinja` and the folder `additional_chat_templates`,
            or in `tokenizer_config.json`, or in `chat_template.json`.
        config: the content of `tokenizer_config.json`.

    Raises:
        ChatTemplateError: a file is damaged.
    """
    names = {DEFAULT: "chat_template.jinja"}
    more = islice((folder / _MORE).glob("*.jinja"), _MOST_TEMPLATES + 1)
    names |= {file.stem: f"{_MORE}/{file.name}" for file in sorted(more)}
    if len(names) > _MOST_TEMPLATES:
        raise ChatTemplateError(f"{folder} has more than {_MOST_TEMPLATES} chat templates")
    texts = {name: _read(folder, file) for name, file in names.items()}
    templates = {name: text for name, text in texts.items() if text is not None}
    if templates:
        return templates
    config_file = folder / "tokenizer_config.json"
    found = config.get("chat_template")
    if found is None:
        config_file = folder / "chat_template.json"
        content = read_json_object(folder, config_file.name, _MAX_CONFIG_BYTES, ChatTemplateError)
        found = (content or {}).get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {DEFAULT: found}
    try:
        named = {entry["name"]: entry["template"] for entry in found}
    except (KeyError, TypeError):
        named = {}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ChatTemplateError(
            f"{config_file}: chat_template is neither a text nor a list of objects with name and template"
        )
    return named


def read_template(value: str) -> str:
    """Return a template that is given by itself or by the path of its file.

    Raises:
        ChatTemplateError: it is neither.
    """
    if "{{" in value or "{%" in value:
        return value
    file = Path(value).expanduser()
    if not file.is_file():
        raise ChatTemplateError(
            f"the chat template {value[:200]!r} is neither a file nor a Jinja template"
        )
    try:
        return read_given(file, _MAX_TEMPLATE_BYTES, ChatTemplateError).decode()
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{file} cannot be read: {error}") from None


def _read(folder: Path, name: str) -> str | None:
    return read_text(folder, name, _MAX_TEMPLATE_BYTES, ChatTemplateError)


def special_variables(config: Mapping[str, Any]) -> dict[str, object]:
    """Return the variables of tokenizer_config.json that name tokens: `bos_token` and the like."""
    variables: dict[str, object] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            variables[name] = text
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(name)
        if isinstance(value, list):
            texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in value]
            variables[name] = [text for text in texts if isinstance(text, str)]
        elif isinstance(value, dict):
            variables |= {key: text for key, text in value.items() if isinstance(text, str)}
    return variables
