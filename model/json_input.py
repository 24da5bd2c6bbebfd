"""Reads JSON from outside: files of a limited size, and keys of a declared type."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from model.checkpoint_files import read_file
from model.errors import ModelError, ModelFolderError, UnsupportedModelError

T = TypeVar("T")
Harmless: TypeAlias = tuple[tuple[tuple[Any, ...], tuple[str, ...]], ...]

_WORDS: Final = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string", "array": "a list",
    "object": "an object",
}  # fmt: skip
_MAX_DEPTH: Final = 100
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_MISFIT: Final = re.compile(r"(.+?)(?:, got .*?)?(?: - at `\$(?:\.(\w+))?(?:\[(\d+)\])?`)?")


def read_json_object(
    folder: Path, name: str, max_bytes: int, error: type[ModelError] = ModelFolderError
) -> dict[str, Any] | None:
    """Parse a file of a checkpoint, which must hold one JSON object; None if there is no such file.

    Args:
        folder: the checkpoint.
        name: of the file.
        max_bytes: limit of its size.
        error: type of the errors.

    Raises:
        ModelError: of the type `error`: the file cannot be read, is too large, or holds anything else.
    """
    content = read_file(folder, name, max_bytes, error)
    return None if content is None else parse_json_object(content, folder / name, error)


def parse_json_object(content: bytes, file: Path, error: type[ModelError]) -> dict[str, Any]:
    """Parse the content of a file, which must be one JSON object.

    Args:
        content: of the file.
        file: for errors.
        error: type of the errors.

    Raises:
        ModelError: of the type `error`: it is anything else.
    """
    try:
        # Decoded here, because `json` lets lone surrogates in UTF-8 pass, which other libraries do not take.
        value = json.loads(content.decode("utf-8-sig"))
        if _has_lone_surrogate(value):
            raise ValueError("it has half of a surrogate pair, which is no character")
    except (ValueError, RecursionError) as problem:
        raise error(f"{file} is not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise error(f"{file} must hold a JSON object, found {type(value).__name__}")
    return value


def _has_lone_surrogate(value: object) -> bool:
    """Whether a text in a JSON value cannot be encoded.

    Raises:
        RecursionError: the value has more than `_MAX_DEPTH` levels: some of what reads it recurses.
    """
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):
        parts: list[object] = []
        for node in level:
            if isinstance(node, dict):
                parts += node
                parts += node.values()
            elif isinstance(node, list):
                parts += node
            elif isinstance(node, str) and _SURROGATE.search(node):
                return True
        if not parts:
            return False
        level = parts
    raise RecursionError(f"it has more than {_MAX_DEPTH} levels")


def convert(values: Mapping[str, Any], kind: type[T]) -> T:
    """Build an object from JSON values, checking types and limits.

    Args:
        values: value by field name; unknown names are ignored, null counts as absent.
        kind: a `msgspec.Struct` whose fields have defaults and whose annotations state types and limits.

    Raises:
        ModelFolderError: a value is of the wrong type or outside its limits. The message names the key, what is
            allowed, and the value.
    """
    present = {name: value for name, value in values.items() if value is not None}
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        raise _misfit(str(error), present) from None


def check(value: object, kind: Any, key: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return a JSON value, checking its type and limits.

    Args:
        value: the value.
        kind: a type that states them, such as `Annotated[int, Meta(ge=1)]`.
        key: of the value, for errors.

    Raises:
        ModelFolderError: as for `convert`.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _misfit(str(error), value, key) from None


def _misfit(message: str, found: Any, key: str = "") -> ModelFolderError:  # noqa: ANN401 - any JSON value
    """Return the error for a value that `msgspec` refuses: `found`, or the one in it that the message names."""
    misfit = _MISFIT.fullmatch(message)
    assert misfit is not None, message
    problem, name, index = misfit.groups()
    if name is not None:
        key, found = name, found[name]
    if index is not None:
        key, found = f"{key}[{index}]", found[int(index)]
    wanted = re.sub(r"`(.+)`", lambda it: _in_words(it[1]), problem.removeprefix("Expected "))
    return ModelFolderError(f"{key} must be {wanted}, found {shorten(found)}")


def _in_words(types: str) -> str:
    return " or ".join(_WORDS[name] for name in types.split(" | ") if name != "null")


def refuse(values: Mapping[str, Any], harmless: Harmless, prefix: str = "") -> None:
    """Check that no key enables an unsupported feature.

    Args:
        values: a JSON object.
        harmless: pairs of values and keys: each key of a pair may have any of its values, be null or be absent.
        prefix: added in errors before each key.

    Raises:
        UnsupportedModelError: a key has another value.
    """
    for supported, keys in harmless:
        for key in keys:
            if (value := values.get(key)) is not None and value not in supported:
                raise UnsupportedModelError(
                    f"{prefix}{key} = {shorten(value)} is not supported; pick a checkpoint without it"
                    + "".join(f" or with {it!r}" for it in supported)
                )


def shorten(value: object, limit: int = 80) -> str:
    """Return the `repr` of a value, cut to at most `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
