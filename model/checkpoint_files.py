"""The files of a checkpoint by name, whether they lie in a folder or a GGUF file stands for them."""

from __future__ import annotations

from pathlib import Path

from model import files
from model.errors import ModelError
from model.gguf import files as gguf_files


def read_file(folder: Path, name: str, max_bytes: int, error: type[ModelError]) -> bytes | None:
    """Return the content of a file of a checkpoint; None if there is no such file.

    Args:
        folder: the checkpoint: a folder, or a GGUF file.
        name: of the file, relative to the folder.
        max_bytes: limit of its size.
        error: type of the errors.

    Raises:
        ModelError: as `model.files.read_file` and `model.gguf.files.read_file`.
    """
    read = gguf_files.read_file if folder.is_file() else files.read_file
    return read(folder, name, max_bytes, error)


def read_text(folder: Path, name: str, max_bytes: int, error: type[ModelError]) -> str | None:
    """Return the text of a file of a checkpoint, which must be UTF-8; otherwise like `read_file`."""
    content = read_file(folder, name, max_bytes, error)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as problem:
        raise error(f"{folder / name} cannot be read: {problem}") from None
