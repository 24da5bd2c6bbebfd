"""The digest of a checkpoint: what two machines compare to know that they serve the same one.

It covers the files from which the engine computes logits and the masks of grammars: configuration, weights and
tokenizer. It covers no others, such as the chat template, since copies of a checkpoint differ in these. Does not import
PyTorch.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Final

from model.checkpoint.side_files import SIDE_FILES
from model.errors import WeightsError
from model.files import open_file
from model.gguf.source import part_files
from model.weight_files import INDEX_NAME, pickle_files, safetensors_files

_BESIDE: Final = ("config.json", "tokenizer.json", INDEX_NAME, *SIDE_FILES)
_SIZE_BYTES: Final = 8


def checkpoint_digest(checkpoint: Path, unchanged_since: float | None = None) -> str:
    """Return the digest of the names and contents of a checkpoint's files.

    Reads all of them, at about 1 GB per second; a file that was read before and is still the same by its size, time and
    inode is not read again.

    Args:
        checkpoint: a folder, or a GGUF file.
        unchanged_since: refuse a file that was changed later, seconds since 1970; None for no limit.

    Returns:
        `sha256:` and 64 hexadecimal digits.

    Raises:
        ModelError: a file is missing, cannot be read, or was changed.
    """
    digest = hashlib.sha256()
    for file in sorted(_files(checkpoint), key=lambda it: it.name):
        with open_file(file.parent, file.name, WeightsError) as descriptor:
            stat = os.fstat(descriptor)
        if unchanged_since is not None and stat.st_ctime > unchanged_since:
            raise WeightsError(f"{file} was changed after it was loaded")
        content = _file_digest(file, stat.st_size, stat.st_mtime_ns, stat.st_ino)
        digest.update(file.name.encode("utf-8", "surrogateescape") + b"\0")
        digest.update(stat.st_size.to_bytes(_SIZE_BYTES, "little") + content)
    return f"sha256:{digest.hexdigest()}"


def _files(checkpoint: Path) -> list[Path]:
    """Return the files that make the results of a checkpoint.

    Raises:
        ModelError: there are no weights.
    """
    if checkpoint.is_file():
        return part_files(checkpoint)
    found = safetensors_files(checkpoint) or pickle_files(checkpoint)
    if found is None:
        raise WeightsError(f"{checkpoint} has no weights")
    beside = [checkpoint / name for name in _BESIDE]
    return [*found[0], *(file for file in beside if os.path.lexists(file))]


@functools.lru_cache(maxsize=4096)
def _file_digest(file: Path, size: int, mtime_ns: int, inode: int) -> bytes:
    """Return the SHA-256 of a file; the arguments after the first tell its versions apart."""
    with open_file(file.parent, file.name, WeightsError) as descriptor:
        try:
            with os.fdopen(os.dup(descriptor), "rb", buffering=0) as opened:
                digest = hashlib.file_digest(opened, "sha256").digest()
                stat = os.fstat(opened.fileno())
        except OSError as problem:
            raise WeightsError(f"{file} cannot be read: {problem.strerror}") from None
    if (stat.st_size, stat.st_mtime_ns, stat.st_ino) != (size, mtime_ns, inode):
        raise WeightsError(f"{file} was changed while it was read")
    return digest
