"""The files that a checkpoint's folder would have, made from a GGUF checkpoint. Imports no PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from model.errors import ModelError
from model.gguf.config import to_config, to_generation_config
from model.gguf.source import Source
from model.gguf.tokenizer import to_tokenizer, to_tokenizer_config

_FILES: Final[Mapping[str, Callable[[Source], dict[str, Any]]]] = {
    "config.json": to_config,
    "generation_config.json": to_generation_config,
    "tokenizer.json": to_tokenizer,
    "tokenizer_config.json": to_tokenizer_config,
}


def read_file(file: Path, name: str, max_bytes: int, error: type[ModelError]) -> bytes | None:
    """Return the content that a file of a checkpoint would have; None if there would be no such file.

    Args:
        file: the GGUF checkpoint.
        name: of the file.
        max_bytes: limit of its size.
        error: type of the errors, but for those of features that are not supported.

    Raises:
        ModelError: the checkpoint is damaged or not supported, or the content is larger.
    """
    make = _FILES.get(name)
    if make is None:
        return None
    try:
        content = json.dumps(make(Source(file)), ensure_ascii=False).encode()
    except UnicodeEncodeError as problem:
        raise error(f"{file}: {name} cannot be made: {problem}") from None
    if len(content) > max_bytes:
        raise error(f"{file}: {name} would have {len(content)} bytes; at most {max_bytes} are read")
    return content
