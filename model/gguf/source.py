"""A GGUF checkpoint: one file, or several that a model was split into. Imports no PyTorch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from model.errors import ModelFolderError, UnsupportedModelError
from model.gguf.reader import Array, Header, TensorEntry, Value, map_file, read_array, read_header

MAX_PARTS: Final = 1_000
MAX_ELEMENTS: Final = 2_000_000
"""Of an array of the metadata: the tokens of a vocabulary, or its merges."""
SPLIT: Final = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE
)
_LARGEST_VECTOR: Final = 1 << 20
"""Elements of a vector that becomes part of the configuration, such as a factor for each frequency."""


class Source:
    """The metadata and the tensors of a GGUF checkpoint. Nothing is kept in memory but the header.

    Args:
        file: the checkpoint; of several files, any of them.

    Attributes:
        file: its first file.
        metadata: of its first file.
        tensors: of all its files, by name.

    Raises:
        ModelFolderError: a file is damaged or missing, or the files do not fit each other.
        UnsupportedModelError: a tensor has a type that is not read.
    """

    def __init__(self, file: Path) -> None:
        headers = _headers(file)
        self.file = headers[0].file
        self.metadata: Mapping[str, Value] = headers[0].metadata
        self.tensors: dict[str, TensorEntry] = {}
        self._read: set[str] = set()
        for header in headers:
            if twice := self.tensors.keys() & header.tensors.keys():
                raise ModelFolderError(
                    f"{header.file} has the tensor {min(twice)!r}, as {self.file} has"
                )
            self.tensors |= header.tensors
        stated = self.metadata.get("split.tensors.count", len(self.tensors))
        if stated != len(self.tensors):
            raise ModelFolderError(
                f"{self.file} and its other parts have {len(self.tensors)} tensors;"
                f" split.tensors.count is {stated!r:.40}"
            )

    def find(self, key: str) -> Value | None:
        """Return a value of the metadata; None if there is none."""
        self._read.add(key)
        return self.metadata.get(key)

    def unread(self, prefix: str) -> list[str]:
        """Return the keys with a prefix that nobody has asked for, sorted."""
        return sorted(key for key in self.metadata.keys() - self._read if key.startswith(prefix))

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`."""
        return self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text of the metadata.

        Raises:
            ModelFolderError: it is missing and has no default, or is no text.
        """
        found = self.find(key)
        found = default if found is None else found
        if not isinstance(found, str):
            raise self._misfit(key, found, "a text")
        return found

    def optional_integer(self, key: str, *ignored: int) -> int | None:
        """Return a whole number of the metadata; None if there is none. An array of equal numbers is one number.

        Args:
            key: of the metadata.
            ignored: numbers that an array may have beside the equal ones.

        Raises:
            ModelFolderError: it is no whole number.
            UnsupportedModelError: it is an array of different numbers, one for each layer.
        """
        found = self.find(key)
        if isinstance(found, Array):
            values = set(self.array(key)) - {*ignored}
            if len(values) > 1:
                raise UnsupportedModelError(
                    f"{self.file}: {key} differs from layer to layer, which is not supported"
                )
            found = values.pop() if values else None
        if found is None:
            return None
        if type(found) is not int or found < 0:
            raise self._misfit(key, found, "a whole number")
        return found

    def integer(self, key: str) -> int:
        """Return a whole number of the metadata, which must be there; otherwise as `optional_integer`."""
        found = self.optional_integer(key)
        if found is None:
            raise self._misfit(key, None, "a whole number")
        return found

    def optional_number(self, key: str) -> float | None:
        """Return a number of the metadata, as the decimal number that was rounded to float32; None if there is none.

        Raises:
            ModelFolderError: it is no number, or not finite.
        """
        found = self.find(key)
        if found is None:
            return None
        if (
            isinstance(found, bool)
            or not isinstance(found, int | float)
            or not math.isfinite(found)
        ):
            raise self._misfit(key, found, "a number")
        rounded = np.float32(found)
        return float(str(rounded)) if rounded == found else float(found)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false of the metadata.

        Raises:
            ModelFolderError: it is neither.
        """
        found = self.find(key)
        found = default if found is None else found
        if not isinstance(found, bool):
            raise self._misfit(key, found, "true or false")
        return found

    def array(self, key: str) -> list[Any]:
        """Return an array of the metadata; an empty list if there is none.

        Raises:
            ModelFolderError: it is no array, is too long, or has a text that is not UTF-8.
        """
        found = self.find(key)
        if found is None:
            return []
        if not isinstance(found, Array):
            raise self._misfit(key, found, "an array")
        if found.count > MAX_ELEMENTS:
            raise ModelFolderError(
                f"{self.file}: {key} has {found.count} elements; at most {MAX_ELEMENTS} are read"
            )
        return read_array(self.file, found)

    def vector(self, name: str) -> list[float]:
        """Return the elements of a tensor of float32 with one dimension, which belongs to the configuration.

        Raises:
            ModelFolderError: it is another tensor, or too long.
        """
        entry = self.tensors[name]
        if entry.kind.name != "F32" or len(entry.shape) != 1 or entry.shape[0] > _LARGEST_VECTOR:
            raise ModelFolderError(
                f"{self.file}: {name} must be a vector of F32 with at most {_LARGEST_VECTOR} elements,"
                f" found {entry.kind.name} {list(entry.shape)}"
            )
        with map_file(entry.file) as content:
            raw = content[entry.start : entry.start + entry.num_bytes]
        return [float(str(it)) for it in np.frombuffer(raw, "<f4")]

    def _misfit(self, key: str, found: object, wanted: str) -> ModelFolderError:
        shown = "which is missing" if found is None else f"found {found!r:.80}"
        return ModelFolderError(f"{self.file}: {key} must be {wanted}, {shown}")


def part_files(file: Path) -> list[Path]:
    """Return all files of a checkpoint that was split, in order; the file alone if it was not.

    Raises:
        ModelFolderError: a file is missing, or the names count wrongly.
    """
    found = SPLIT.fullmatch(file.name)
    if found is None:
        return [file]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= MAX_PARTS:
        raise ModelFolderError(f"{file} is no part of 1 to {MAX_PARTS} files, as its name says")
    suffix = file.name[len(found["stem"]) :][-5:]
    names = (
        f"{found['stem']}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)
    )
    files = [file.with_name(name) for name in names]
    if missing := [it.name for it in files if not it.exists()]:
        raise ModelFolderError(
            f"{file} is one of {count} files; {missing[0]} is missing"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    return files


def _headers(file: Path) -> list[Header]:
    files = part_files(file)
    first = read_header(files[0])
    stated = first.metadata.get("split.count", 1)
    # A file that was split into one part has the key, but not always the name.
    if stated not in (0, len(files)):
        raise ModelFolderError(
            f"{files[0]} is one of {stated!r:.40} files, whose names must be name-00001-of-0000N.gguf"
        )
    return [first, *map(read_header, files[1:])]
