"""Finds, checks and reads the safetensors files of a checkpoint folder; pickle files only where that is asked for."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import safetensors
from torch import Tensor

from model.checkpoint.files.pickles import open_pickle
from model.checkpoint.formats.format import FLOATS, StoredTensor
from model.checkpoint.gguf_parts import open_gguf
from model.checkpoint.other_folders import describe
from model.errors import PICKLE_ADVICE, WeightsError
from model.files import STAND_IN_BYTES, open_file, path_of_descriptor, stand_in
from model.weight_files import INDEX_NAME, PICKLES, SINGLE_NAME, pickle_files, safetensors_files

_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SUFFIX: Final = ".safetensors"
_FP8: Final = ("F8_E4M3", "F8_E5M2")
_LISTED: Final = 3
_PICKLE_SUFFIX: Final = ".bin"

_logger = logging.getLogger(__name__)


def find_shards(folder: Path, *, pickle: bool = False) -> tuple[list[Path], dict[str, str]]:
    """List the safetensors files of a folder.

    Args:
        folder: the checkpoint folder.
        pickle: whether to list pickle files if there are no safetensors files.

    Returns:
        The files in a fixed order, and the index: file name by tensor name; empty if there is no index.

    Raises:
        WeightsError: there are no files or only pickle files, the index is broken, or it names a file that does
            not exist or is outside the folder.
    """
    found = safetensors_files(folder)
    if pickle and found is None:
        found = pickle_files(folder)
        if found is not None:
            names = ", ".join(it.name for it in found[0][:_LISTED])
            _logger.warning(
                "the weights are read from pickle files, as --load-format says: %s", names
            )
    elif pickle:
        _logger.info("--load-format pickle has no effect: %s has safetensors files", folder)
    if found is None:
        raise WeightsError(_nothing_to_load(folder, pickle=pickle))
    return found


def _nothing_to_load(folder: Path, *, pickle: bool) -> str:
    if (found := describe(folder)) is not None:
        return f"{folder} has no {SINGLE_NAME}: {found}"
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickle:
        names = ", ".join((SINGLE_NAME, INDEX_NAME, *PICKLES))
        found = f"; it has {', '.join(pickles[:_LISTED])}" if pickles else ""
        return f"{folder} has none of {names}{found}"
    if pickles:
        return f"{folder} holds its weights as pickle only ({', '.join(pickles[:_LISTED])}); {PICKLE_ADVICE}"
    return f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}"


def read_headers(folder: Path, *, pickle: bool = False) -> dict[str, StoredTensor]:
    """Read the headers of all files and list the tensors of the checkpoint, of any dtype.

    Args:
        folder: the checkpoint folder.
        pickle: as for `find_shards`.

    Raises:
        WeightsError: a file is damaged, a tensor is stored twice, or a tensor is not in the file that the index names.
    """
    files, weight_map = find_shards(folder, pickle=pickle)
    stored: dict[str, StoredTensor] = {}
    for file in files:
        with open_shard(file) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                if name in stored:
                    raise WeightsError(f"{name} is in both {stored[name].file} and {file}")
                entry = shard.get_slice(name)
                dtype = str(entry.get_dtype())
                stored[name] = StoredTensor(file, tuple(entry.get_shape()), dtype)
    for name, shard_name in weight_map.items():
        if name not in stored or stored[name].file.name != shard_name:
            raise WeightsError(f"{folder / shard_name} lacks {name}, which the index places there")
    return stored


def check_dtypes(stored: Mapping[str, StoredTensor], *dtypes: str) -> None:
    """Check that tensors are stored in dtypes that can be read.

    Args:
        stored: the tensors by name.
        dtypes: supported ones besides floats of 16 and 32 bits.

    Raises:
        WeightsError: a tensor is stored in another one.
    """
    supported = (*FLOATS, *dtypes)
    for name, entry in stored.items():
        if entry.dtype not in supported:
            text = (
                f"{entry.file}: {name} is stored as {entry.dtype}; supported are"
                f" {', '.join(supported)}"
            )
            if entry.dtype in _FP8:
                text += "; quantization fp8 makes FP8 of a checkpoint in one of these"
            raise WeightsError(text)


@contextlib.contextmanager
def open_shard(file: Path) -> Iterator[Any]:
    """Map a safetensors file into memory, or a pickle file that `find_shards` has listed.

    Raises:
        WeightsError: the file is truncated, its header is oversized or contradicts itself, or it cannot be read.
    """
    if problem := stand_in(_beginning(file)):
        raise WeightsError(f"{file} {problem}")
    if file.suffix == _PICKLE_SUFFIX:
        with open_pickle(file) as tensors:
            yield tensors
        return
    try:
        with (
            open_file(file.parent, file.name, WeightsError) as descriptor,
            safetensors.safe_open(
                path_of_descriptor(descriptor, file), framework="pt", device="cpu"
            ) as shard,
        ):
            yield shard
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise WeightsError(f"{file} cannot be read as safetensors: {error}") from None


def _beginning(file: Path) -> bytes:
    with contextlib.suppress(OSError), open_file(file.parent, file.name, WeightsError) as opened:
        return os.pread(opened, STAND_IN_BYTES, 0)
    return b""


def read_tensors(stored: dict[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors, file by file, as views of the mapped files.

    Raises:
        WeightsError: a file cannot be read.
    """
    by_file: dict[Path, list[str]] = {}
    for name, entry in stored.items():
        by_file.setdefault(entry.file, []).append(name)
    for file, names in by_file.items():
        opened = open_shard if file.suffix in (_SUFFIX, _PICKLE_SUFFIX) else open_gguf
        with opened(file) as shard:
            for name in names:
                yield name, shard.get_tensor(name)
