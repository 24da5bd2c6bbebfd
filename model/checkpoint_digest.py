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
from typing import Final, TypeAlias

from model.checkpoint.files.side_files import SIDE_FILES
from model.errors import WeightsError
from model.files import open_file
from model.gguf.source import part_files
from model.weight_files import INDEX_NAME, pickle_files, safetensors_files

_BESIDE: Final = ("config.json", "tokenizer.json", INDEX_NAME, *SIDE_FILES)
_SIZE_BYTES: Final = 8


Signature: TypeAlias = tuple[tuple[Path, int, int, int], ...]
"""Path, size, modification time in nanoseconds and inode of each file of a checkpoint."""


def checkpoint_signature(checkpoint: Path) -> Signature:
    """Return what tells that a checkpoint's files are still the same, without reading them.

    Args:
        checkpoint: a folder, or a GGUF file.

    Raises:
        ModelError: a file is missing, or may not be read.
    """
    return tuple(map(_signature, sorted(_files(checkpoint), key=lambda it: it.name)))


def checkpoint_digest(checkpoint: Path, unchanged: Signature | None = None) -> str:
    """Return the digest of the names and contents of a checkpoint's files.

    Reads all of them, at about 1 GB per second; a file that was read before and is still the same by its size, time and
    inode is not read again.

    Args:
        checkpoint: a folder, or a GGUF file.
        unchanged: the signature that it must have; None for any.

    Returns:
        `sha256:` and 64 hexadecimal digits.

    Raises:
        ModelError: a file is missing, cannot be read, or was changed.
    """
    signature = checkpoint_signature(checkpoint)
    if unchanged is not None and unchanged != signature:
        changed = sorted({str(entry[0]) for entry in {*unchanged} ^ {*signature}})
        raise WeightsError(f"{changed[0]} was changed after it was loaded")
    digest = hashlib.sha256()
    for entry in signature:
        file, size = entry[:2]
        digest.update(file.name.encode("utf-8", "surrogateescape") + b"\0")
        digest.update(size.to_bytes(_SIZE_BYTES, "little") + _file_digest(*entry))
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


def _signature(file: Path) -> tuple[Path, int, int, int]:
    with open_file(file.parent, file.name, WeightsError) as descriptor:
        return file, *_version(descriptor)


def _version(descriptor: int) -> tuple[int, int, int]:
    stat = os.fstat(descriptor)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


@functools.lru_cache(maxsize=4096)
def _file_digest(file: Path, size: int, mtime_ns: int, inode: int) -> bytes:
    """Return the SHA-256 of a file; the arguments after the first tell its versions apart."""
    with open_file(file.parent, file.name, WeightsError) as descriptor:
        try:
            with os.fdopen(os.dup(descriptor), "rb", buffering=0) as opened:
                digest = hashlib.file_digest(opened, "sha256").digest()
                version = _version(descriptor)
        except OSError as problem:
            raise WeightsError(f"{file} cannot be read: {problem.strerror}") from None
    if version != (size, mtime_ns, inode):
        raise WeightsError(f"{file} was changed while it was read")
    return digest
