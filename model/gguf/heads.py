"""The dimensions of heads in GGUF files. Imports no PyTorch."""

from __future__ import annotations

from typing import Any

from model.errors import ModelFolderError, UnsupportedModelError
from model.gguf.source import Source


def head_dim(source: Source) -> int:
    """Return the elements of a head of queries, which are those of keys and values too.

    Raises:
        ModelFolderError: the metadata do not tell, or tell 0.
        UnsupportedModelError: values have another number.
    """
    arch = source.architecture
    heads = source.integer(f"{arch}.attention.head_count")
    hidden = source.integer(f"{arch}.embedding_length")
    if not heads:
        raise ModelFolderError(
            f"{source.file}: {arch}.attention.head_count must be at least 1, found 0"
        )
    dims = source.optional_integer(f"{arch}.attention.key_length") or hidden // heads
    if not dims:
        raise ModelFolderError(
            f"{source.file}: {arch}.embedding_length = {hidden} is too small for {heads} heads"
        )
    values = source.optional_integer(f"{arch}.attention.value_length") or dims
    if values != dims:
        raise UnsupportedModelError(
            f"{source.file}: values of {values} dimensions beside keys of {dims} are not supported"
        )
    return dims


def whole_rotation(source: Source) -> dict[str, Any]:
    """Check that whole heads rotate, and return nothing."""
    arch, dims = source.architecture, head_dim(source)
    rotating = source.optional_integer(f"{arch}.rope.dimension_count")
    if rotating not in (None, dims):
        raise UnsupportedModelError(
            f"{source.file}: {arch}.rope.dimension_count = {rotating} is not supported with heads of {dims} dimensions"
        )
    return {}
