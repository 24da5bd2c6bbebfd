"""Reads the tensors of pickle files (`pytorch_model.bin`), by PyTorch's unpickler of tensors alone.

A pickle is a program. Before it runs, its calls are compared with the few that make tensors (`_may_call`); then
`torch.load(weights_only=True)` runs it, which compares them once more. It is no sandbox: a file may still exploit a
mistake in PyTorch (docs/decisions/0071). So these files are read only where the operator asks for it.
"""

from __future__ import annotations

import contextlib
import os
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from model.errors import WeightsError
from model.files import open_file, path_of_descriptor
from model.json_input import shorten

if TYPE_CHECKING:
    from typing import IO, BinaryIO

_MAX_PROGRAM_BYTES: Final = 16 * 2**20
"""Of the pickle itself, which has the names, shapes and places of tensors."""
_MAX_ENTRIES: Final = 200_000
_ARCHIVE: Final = b"PK\x03\x04"
_DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes as in safetensors files."""
_may_call: Final = re.compile(
    r"collections\.OrderedDict|torch\._utils\._rebuild_(tensor|tensor_v2|parameter)|torch\.(\w+Storage|Size)"
    r"|torch\.storage\.(Typed|Untyped)Storage"
).fullmatch
"""Whether a pickle of tensors may name a function or a class."""
_PROGRAMS: Final = 5
"""Pickles at the beginning of a file in the format of PyTorch before 1.6; its bytes of tensors follow."""


class PickledTensor(NamedTuple):
    """A tensor of a pickle file, with the methods of a slice of safetensors."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype as in safetensors files."""
        dtype = self.tensor.dtype
        return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


class PickleShard:
    """The tensors of a pickle file, with the methods of an open safetensors file.

    Args:
        tensors: by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> PickledTensor:
        """Return what describes a tensor."""
        return PickledTensor(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor, which may be a view of the mapped file."""
        return self._tensors[name]


@contextlib.contextmanager
def open_pickle(file: Path) -> Iterator[PickleShard]:
    """Open a pickle file; map it into memory, unless it has the format of PyTorch before 1.6, which is read whole.

    Raises:
        WeightsError: the file is damaged, cannot be read, or holds anything but tensors by name.
    """
    with open_file(file.parent, file.name, WeightsError) as descriptor:
        try:
            tensors = _load(descriptor, file)
        except WeightsError:
            raise
        # Damaged files raise errors of many types, of PyTorch, its unpickler and the ZIP library.
        except Exception as error:  # noqa: BLE001 - as above
            raise WeightsError(
                f"{file} cannot be read as a pickle of tensors: {_why(error)}"
            ) from None
        yield PickleShard(tensors)


def _load(descriptor: int, file: Path) -> dict[str, Tensor]:
    path = path_of_descriptor(descriptor, file)
    with os.fdopen(os.dup(descriptor), "rb") as opened:
        # As PyTorch tells archives from the earlier format.
        is_archive = opened.read(len(_ARCHIVE)) == _ARCHIVE
        opened.seek(0)
        if is_archive:
            _check_archive(opened, file)
        else:
            for _ in range(_PROGRAMS):
                _check_calls(opened, file)
    with warnings.catch_warnings():
        # It warns of versions of the pickle protocol, which the error names if they matter.
        warnings.simplefilter("ignore")
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    if not isinstance(loaded, Mapping):
        raise WeightsError(f"{file} holds a {type(loaded).__name__}, not tensors by name")
    return {_name(name, file): _tensor(value, name, file) for name, value in loaded.items()}


def _check_archive(opened: BinaryIO, file: Path) -> None:
    """Check that reading a ZIP archive takes no more memory than it has bytes.

    Raises:
        WeightsError: it may, or it is no archive of tensors.
    """
    size = opened.seek(0, os.SEEK_END)
    archive = zipfile.ZipFile(opened)
    entries = archive.infolist()
    if len(entries) > _MAX_ENTRIES:
        raise WeightsError(f"{file} has {len(entries)} entries; at most {_MAX_ENTRIES} are read")
    if any(Path(it.filename).name == "constants.pkl" for it in entries):
        raise WeightsError(f"{file} is a TorchScript archive, which has code, not tensors by name")
    for it in entries:
        what = f"{file}: the entry {shorten(it.filename)}"
        if it.compress_type != zipfile.ZIP_STORED:
            raise WeightsError(f"{what} is compressed, which torch.save does not do")
        if it.filename.endswith(".pkl") and it.file_size > _MAX_PROGRAM_BYTES:
            raise WeightsError(
                f"{what} has {it.file_size} bytes; at most {_MAX_PROGRAM_BYTES} are read"
            )
    if (total := sum(it.file_size for it in entries)) > size:
        raise WeightsError(f"{file} has {size} bytes, and its entries {total}")
    for it in entries:
        if it.filename.endswith(".pkl"):
            with archive.open(it) as program:
                _check_calls(program, file)


def _check_calls(program: IO[bytes], file: Path) -> None:
    """Check that a pickle, which is read to its end, names no function and no class but those of tensors.

    Raises:
        WeightsError: it names another one.
        ValueError: it is no pickle.
    """
    for operation, argument, _ in pickletools.genops(program):
        if operation.name == "GLOBAL" and not _may_call(name := str(argument).replace(" ", ".")):
            raise WeightsError(
                f"{file} calls {shorten(name)}, which is not needed for tensors and may run any code"
            )


def _name(name: object, file: Path) -> str:
    if not isinstance(name, str):
        raise WeightsError(f"{file} has the key {shorten(name)}, which is no name of a tensor")
    return name


def _tensor(value: object, name: str, file: Path) -> Tensor:
    if not isinstance(value, Tensor):
        raise WeightsError(f"{file}: {shorten(name)} is a {type(value).__name__}, not a tensor")
    return value.detach()


def _why(error: Exception) -> str:
    """Say in one line what is wrong; PyTorch's own words recommend to run the file's code."""
    text = str(error)
    if "weights_only" in text:
        return "it does more than make tensors"
    first = text.strip().partition("\n")[0]
    return f"{type(error).__name__}: {shorten(first)}" if first else type(error).__name__
