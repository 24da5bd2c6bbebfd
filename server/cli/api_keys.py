"""Reads the API keys of the service from the settings and from a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

from server.cli.settings import check_keys

if TYPE_CHECKING:
    from pathlib import Path

    from server.cli.settings import Settings


class ApiKeyError(Exception):
    """The file of the API keys cannot be used; the text says why and shows no key."""


def api_keys(settings: Settings) -> tuple[str, ...]:
    """Return all keys, each once; none if the service is open to all.

    Raises:
        ApiKeyError: the file cannot be read, has no key, or has one that could not be sent in a header.
    """
    keys = settings.api_key
    if settings.api_key_file is not None:
        keys += _read(settings.api_key_file)
    return tuple(dict.fromkeys(keys))


def _read(path: Path) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
        keys = check_keys(tuple(line for line in lines if line and not line.startswith("#")))
    except (OSError, UnicodeDecodeError, PydanticCustomError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not UTF-8"
        raise ApiKeyError(f"--api-key-file {path}: {reason}") from None
    if not keys:
        raise ApiKeyError(f"--api-key-file {path}: the file has no key")
    return keys
