"""Reads adapter_model.safetensors without PyTorch: the file is read once, so that what is checked is what is used."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from model.errors import PICKLE_ADVICE, AdapterError
from model.files import read_file
from model.json_input import shorten

WEIGHTS: Final = "adapter_model.safetensors"
_PICKLE: Final = "adapter_model.bin"
_ITEM_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}
_EXPONENTS: Final = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}
"""Bits of the exponent; all of them are set in numbers that are not finite."""
_LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 8 << 20
_MOST_DIMENSIONS: Final = 5
"""Those of matrices of a convolution of volumes, which are refused by name; the others have two."""


class Entry(NamedTuple):
    """A tensor in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class AdapterFile:
    """The tensors of an adapter in memory.

    Attributes:
        digest: SHA-256 of both files of the adapter, in hexadecimal.
        entries: of the tensors, by their names.

    Args:
        folder: of the adapter.
        config: content of its other file.
        max_bytes: limit of the size of the tensors.

    Raises:
        AdapterError: the file is missing, larger, damaged, or has tensors of other dtypes than floats of 16 and 32
            bits.
    """

    def __init__(self, folder: Path, config: bytes, max_bytes: int) -> None:
        self._file = folder / WEIGHTS
        content = read_file(folder, WEIGHTS, max_bytes + MAX_HEADER_BYTES, AdapterError)
        if content is None:
            has = f"; it has {_PICKLE}: {PICKLE_ADVICE}" if (folder / _PICKLE).exists() else ""
            raise AdapterError(f"{folder} has no {WEIGHTS}{has}")
        # Of each alone first, so that no byte can move from one file to the other.
        parts = hashlib.sha256(config).digest() + hashlib.sha256(content).digest()
        self.digest = hashlib.sha256(parts).hexdigest()
        length = int.from_bytes(content[:_LENGTH_BYTES], "little")
        if len(content) < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, len(content)):
            raise self._damaged("the length of its header")
        self._values = memoryview(content)[_LENGTH_BYTES + length :]
        self.entries = self._read_header(content[_LENGTH_BYTES : _LENGTH_BYTES + length])

    def _damaged(self, what: str) -> AdapterError:
        return AdapterError(f"{self._file} is no valid safetensors file: {what}")

    def _read_header(self, header: bytes) -> dict[str, Entry]:
        try:
            read: dict[str, Any] = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise self._damaged("its header is not JSON") from None
        read.pop("__metadata__", None)
        entries: dict[str, Entry] = {}
        used: list[tuple[int, int]] = []
        for name, entry in read.items():
            match entry:
                case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]}:
                    pass
                case _:
                    raise self._damaged(f"the entry of {shorten(name)}")
            if dtype not in _ITEM_BYTES:
                known = ", ".join(_ITEM_BYTES)
                raise AdapterError(
                    f"{self._file}: {shorten(name)} is stored as {shorten(dtype)}; supported are {known}"
                )
            sizes = (*shape, start, stop)
            if any(type(it) is not int or not 0 <= it <= 1 << 40 for it in sizes):
                raise self._damaged(f"the entry of {shorten(name)}")
            if (
                len(shape) > _MOST_DIMENSIONS
                or stop - start != math.prod(shape) * _ITEM_BYTES[dtype]
            ):
                raise self._damaged(f"the size of {shorten(name)}")
            used.append((start, stop))
            entries[name] = Entry(dtype, tuple(shape), start)
        end = 0
        for start, stop in sorted(used):
            if start != end:
                raise self._damaged("its tensors overlap or leave gaps")
            end = stop
        if end != len(self._values):
            raise self._damaged("it is truncated or has further bytes")
        return entries

    def find_not_finite(self) -> str | None:
        """Return the name of a tensor with numbers that are not finite; None if there is none."""
        dtypes = {it.dtype for it in self.entries.values()}
        if len(dtypes) == 1 and _is_finite(self._values, dtypes.pop()):
            return None  # the usual case: all tensors at once
        for name, (dtype, shape, start) in self.entries.items():
            stop = start + math.prod(shape) * _ITEM_BYTES[dtype]
            if not _is_finite(self._values[start:stop], dtype):
                return name
        return None

    def read(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32; a copy."""
        dtype, shape, start = self.entries[name]
        count = math.prod(shape)
        if dtype == "BF16":
            bits = np.frombuffer(self._values, np.dtype("<u2"), count, start)
            return (bits.astype(np.uint32) << 16).view(np.float32).reshape(shape)
        kind = np.dtype("<f4" if dtype == "F32" else "<f2")
        return np.frombuffer(self._values, kind, count, start).astype(np.float32).reshape(shape)


def _is_finite(values: memoryview, dtype: str) -> bool:
    """Return whether stored numbers are all finite."""
    mask = _EXPONENTS[dtype]
    bits = np.frombuffer(values, np.dtype(f"<u{_ITEM_BYTES[dtype]}"))
    return not bool(((bits & mask) == mask).any())
