"""Reads the header of a GGUF file: its metadata, and where its tensors are.

A file may come from anybody. Every count, length and place is compared with the file's size before it is used, and
arrays are only measured here: their elements are read when they are asked for. So reading a header takes little
memory, whatever the file says. Imports no PyTorch.

Source: docs/gguf.md of the ggml project.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from model.errors import ModelFolderError, UnsupportedModelError
from model.files import open_file
from model.gguf.tensor_types import SUPPORTED, TensorType, find_type, type_name

MAGIC: Final = b"GGUF"
MAX_KEYS: Final = 10_000
MAX_TENSORS: Final = 100_000
MAX_NAME_BYTES: Final = 1_024
MAX_STRING_BYTES: Final = 16 << 20
"""Of a text in the metadata; the longest are chat templates and licences."""
MAX_ALIGNMENT: Final = 1 << 16
MAX_DIMENSIONS: Final = 4

_VERSIONS: Final = (2, 3)
_LFS: Final = b"version https://git-lfs"
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_DTYPES: Final = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_LENGTH: Final = struct.Struct("<Q")
_DEFAULT_ALIGNMENT: Final = 32


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the metadata, which stays in the file.

    Attributes:
        key: of the metadata.
        kind: number of the elements' type.
        count: of elements.
        start: place of the first element in the file, bytes.
    """

    key: str
    kind: int
    count: int
    start: int


Value: TypeAlias = int | float | bool | str | Array


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file.

    Attributes:
        file: that has it.
        shape: as PyTorch has it, so a matrix is [N, C]; GGUF lists the sizes in the other order.
        kind: how it is stored.
        start: place in the file, bytes.
    """

    file: Path
    shape: tuple[int, ...]
    kind: TensorType
    start: int

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) // self.kind.block * self.kind.num_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about itself.

    Attributes:
        file: the file.
        metadata: by key.
        tensors: by name.
    """

    file: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorEntry]


@contextlib.contextmanager
def map_file(file: Path) -> Iterator[mmap.mmap]:
    """Map a file into memory, privately: what is written to the memory does not reach the file.

    Raises:
        ModelFolderError: it is not a regular file, it is empty, or it cannot be read.
    """
    with open_file(file.parent, file.name, ModelFolderError) as descriptor:
        if not os.fstat(descriptor).st_size:
            raise ModelFolderError(f"{file} is empty; is its download complete?")
        try:
            content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelFolderError(f"{file} cannot be read: {error}") from None
    # Not closed here: NumPy and PyTorch may still have views of it, which keep it.
    yield content


def is_gguf(file: Path) -> bool:
    """Whether a path is that of a regular file that begins as GGUF files do."""
    if not file.is_file():
        return False
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(file: Path) -> Header:
    """Read the header of one file.

    Raises:
        ModelFolderError: the file is damaged, truncated, or beyond a limit; says what and where.
        UnsupportedModelError: a tensor has a type that is not read.
    """
    with map_file(file) as content:
        return _Parser(file, content).header()


def read_array(file: Path, array: Array) -> list[Any]:
    """Return the elements of an array of the metadata.

    Raises:
        ModelFolderError: a text is not UTF-8.
    """
    with map_file(file) as content:
        if array.kind == _STRING:
            return _Parser(file, content).texts(array)
        width = np.dtype(_DTYPES[array.kind]).itemsize
        end = array.start + array.count * width
        values: list[Any] = np.frombuffer(content[array.start : end], _DTYPES[array.kind]).tolist()
        return values


class _Parser:
    """Reads a header from front to back."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self._file, self._content, self._size = file, content, len(content)
        self._place = 0

    def header(self) -> Header:
        if self._content[: len(MAGIC)] != MAGIC:
            if self._content[: len(_LFS)] == _LFS:
                raise self._error(
                    "is a pointer of Git LFS and no model: `git lfs pull` fetches the file"
                )
            raise self._error("does not begin with GGUF")
        self._place = len(MAGIC)
        version = self._scalar("<I", "the version")
        if version not in _VERSIONS:
            if version in (it << 24 for it in _VERSIONS):
                raise self._error("is big-endian; only little-endian files are read")
            raise self._error(
                f"has version {version}; supported are 2 and 3: convert the model again"
            )
        num_tensors = self._count(MAX_TENSORS, "tensors")
        num_keys = self._count(MAX_KEYS, "keys of metadata")
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._name("a key of the metadata")
            if key in metadata:
                raise self._error(f"has the key {key!r} twice")
            metadata[key] = self._value(key)
        entries = self._entries(num_tensors)
        return Header(self._file, metadata, self._placed(entries, self._alignment(metadata)))

    def texts(self, array: Array) -> list[str]:
        """Return the elements of an array of texts."""
        content, place, found = self._content, array.start, []
        unpack = _LENGTH.unpack_from
        try:
            for _ in range(array.count):
                (size,) = unpack(content, place)
                place += 8
                found.append(content[place : place + size].decode())
                place += size
        except UnicodeDecodeError as error:
            raise self._error(f"{array.key}[{len(found)}] is not UTF-8: {error.reason}") from None
        return found

    def _value(self, key: str) -> Value:
        kind = self._scalar("<I", f"the type of {key}")
        if kind == _STRING:
            text = self._bytes(MAX_STRING_BYTES, key)
            try:
                return text.decode()
            except UnicodeDecodeError as error:
                raise self._error(f"{key} is not UTF-8: {error.reason}") from None
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._error(f"{key} has a value of type {kind}, which GGUF does not have")
        value: Value = self._scalar(_SCALARS[kind], key)
        return value

    def _array(self, key: str) -> Array:
        kind = self._scalar("<I", f"the type of the elements of {key}")
        count = self._scalar("<Q", f"the length of {key}")
        start = self._place
        if kind == _STRING:
            self._skip_texts(key, count)
        elif kind in _DTYPES:
            self._skip(count * np.dtype(_DTYPES[kind]).itemsize, f"{count} elements of {key}")
        else:
            raise self._error(
                f"{key} is an array of type {kind}; arrays of numbers and of texts are read"
            )
        return Array(key, kind, count, start)

    def _skip_texts(self, key: str, count: int) -> None:
        if count > (self._size - self._place) // 8:
            raise self._error(f"{key} has {count} texts, more than the file has room for")
        content, place, size = self._content, self._place, self._size
        unpack = _LENGTH.unpack_from
        try:
            for _ in range(count):
                (length,) = unpack(content, place)
                place += 8 + length
                if place > size:
                    break
        except struct.error:
            place = size + 1
        if place > size:
            raise self._error(f"a text of {key} ends after the end of the file")
        self._place = place

    def _entries(self, count: int) -> dict[str, tuple[tuple[int, ...], TensorType, int]]:
        entries = {}
        for _ in range(count):
            name = self._name("the name of a tensor")
            if name in entries:
                raise self._error(f"has the tensor {name!r} twice")
            num_dims = self._scalar("<I", f"the number of dimensions of {name}")
            if not 1 <= num_dims <= MAX_DIMENSIONS:
                raise self._error(
                    f"{name} has {num_dims} dimensions; tensors have 1 to {MAX_DIMENSIONS}"
                )
            shape = tuple(self._scalar("<Q", f"the shape of {name}") for _ in range(num_dims))[::-1]
            number = self._scalar("<I", f"the type of {name}")
            offset = self._scalar("<Q", f"the place of {name}")
            kind = find_type(number)
            if kind is None:
                raise UnsupportedModelError(
                    f"{self._file}: {name} is stored as {type_name(number)}, which is not read; read are"
                    f" {', '.join(SUPPORTED)}: take another quantization of the model, such as Q4_K_M or Q8_0"
                )
            if min(shape) < 1 or shape[-1] % kind.block:
                raise self._error(
                    f"{name} has the shape {list(shape)}, whose rows are not of whole blocks of {kind.block}"
                )
            entries[name] = (shape, kind, offset)
        return entries

    def _placed(
        self, entries: Mapping[str, tuple[tuple[int, ...], TensorType, int]], alignment: int
    ) -> dict[str, TensorEntry]:
        """Return the tensors at their places in the file, which must not overlap."""
        base = -(-self._place // alignment) * alignment
        placed = {}
        for name, (shape, kind, offset) in entries.items():
            placed[name] = entry = TensorEntry(self._file, shape, kind, base + offset)
            if offset % alignment:
                raise self._error(f"{name} begins at {offset}, which is no multiple of {alignment}")
            if entry.start + entry.num_bytes > self._size:
                raise self._error(
                    f"{name} ends at byte {entry.start + entry.num_bytes}, but the file has {self._size}; is its"
                    " download complete?"
                )
        end, last = 0, ""
        for name, entry in sorted(placed.items(), key=lambda it: it[1].start):
            if entry.start < end:
                raise self._error(f"the tensors {last} and {name} overlap")
            end, last = entry.start + entry.num_bytes, name
        return placed

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        found = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(found) is not int or not 8 <= found <= MAX_ALIGNMENT or found % 8:
            raise self._error(
                f"general.alignment must be a multiple of 8 up to {MAX_ALIGNMENT}, found {found!r:.40}"
            )
        return found

    def _name(self, what: str) -> str:
        try:
            return self._bytes(MAX_NAME_BYTES, what).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8: {error.reason}") from None

    def _bytes(self, limit: int, what: str) -> bytes:
        size = self._scalar("<Q", f"the length of {what}")
        if size > limit:
            raise self._error(f"{what} has {size} bytes; at most {limit} are read")
        return self._take(size, what)

    def _count(self, limit: int, what: str) -> int:
        count: int = self._scalar("<Q", f"the number of {what}")
        if count > limit:
            raise self._error(f"has {count} {what}; at most {limit} are read")
        return count

    def _scalar(self, form: str, what: str) -> Any:  # noqa: ANN401 - as the form says
        (value,) = struct.unpack(form, self._take(struct.calcsize(form), what))
        return value

    def _take(self, size: int, what: str) -> bytes:
        start = self._place
        self._skip(size, what)
        return self._content[start : start + size]

    def _skip(self, size: int, what: str) -> None:
        if size > self._size - self._place:
            raise self._error(
                f"ends within {what}: {size} bytes are needed at byte {self._place} of {self._size}"
            )
        self._place += size

    def _error(self, problem: str) -> ModelFolderError:
        return ModelFolderError(f"{self._file} {_verb(problem)}")


def _verb(problem: str) -> str:
    """Return a problem as the end of a sentence that begins with the file."""
    first = problem.partition(" ")[0]
    return problem if first in ("is", "has", "ends", "does") else f"is damaged: {problem}"
