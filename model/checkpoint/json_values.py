"""Typed and bounded access to JSON from outside.

Every complaint names the key, the value and the limit. Knows no keys of its own, and no tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.errors import ModelFolderError


def read_json_object(file: Path, max_bytes: int) -> dict[str, Any]:
    """Parse `file`, which must hold one JSON object of at most `max_bytes` bytes.

    Raises:
        ModelFolderError: the file cannot be read, is too large, or holds anything else.
    """
    try:
        size = file.stat().st_size
        if size > max_bytes:
            raise ModelFolderError(f"{file} has {size} bytes; at most {max_bytes} are read")
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelFolderError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file} must hold a JSON object, found {type(value).__name__}")
    return value


class Values:
    """One JSON object; every method raises ModelFolderError for a value outside its type or limits."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values = values
        self._prefix = prefix

    def _complain(self, key: str, wanted: str) -> ModelFolderError:
        return ModelFolderError(
            f"{self._prefix}{key} must be {wanted}, found {shorten(self.values[key])}"
        )

    def _is_absent(self, key: str, *, required: bool) -> bool:
        absent = self.values.get(key) is None
        if absent and required:
            raise ModelFolderError(f"{self._prefix}{key} is missing")
        return absent

    def integer(self, key: str, low: int, high: int) -> int:
        """Return a required whole number from `low` to `high`."""
        self._is_absent(key, required=True)
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._complain(key, f"a whole number from {low} to {high}")
        return value

    def integer_or(self, key: str, low: int, high: int, default: int) -> int:
        """Return a whole number, or `default` where it is absent or null."""
        return default if self._is_absent(key, required=False) else self.integer(key, low, high)

    def number(self, key: str, low: float, high: float) -> float:
        """Return a required finite number from `low` to `high`."""
        self._is_absent(key, required=True)
        value = self.values[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise self._complain(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def number_or(self, key: str, low: float, high: float, default: float) -> float:
        """Return a number, or `default` where it is absent or null."""
        return default if self._is_absent(key, required=False) else self.number(key, low, high)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false, or `default` where it is absent or null."""
        if self._is_absent(key, required=False):
            return default
        if not isinstance(self.values[key], bool):
            raise self._complain(key, "true or false")
        return bool(self.values[key])

    def text(self, key: str) -> str | None:
        """Return a text, or None where it is absent or null."""
        if self._is_absent(key, required=False):
            return None
        if not isinstance(self.values[key], str):
            raise self._complain(key, "a text")
        return str(self.values[key])

    def object(self, key: str) -> dict[str, Any]:
        """Return an object, empty where it is absent or null."""
        if self._is_absent(key, required=False):
            return {}
        if not isinstance(self.values[key], dict):
            raise self._complain(key, "an object")
        return dict(self.values[key])

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return one or several token ids, none where they are absent or null."""
        if self._is_absent(key, required=False):
            return ()
        value = self.values[key]
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            is_integer = isinstance(token, int) and not isinstance(token, bool)
            if not is_integer or not 0 <= token < vocab_size:
                raise self._complain(key, f"token ids from 0 to {vocab_size - 1}")
        return tuple(ids)


def shorten(value: object, limit: int = 80) -> str:
    """Write a value as Python would, in at most `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
