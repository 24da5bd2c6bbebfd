"""Finds the files of a checkpoint's weights. Does not import PyTorch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from model.errors import WeightsError
from model.files import open_file
from model.json_input import read_json_object

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_GPTQ_NAMES: Final = "gptq_model-*bit-*g.safetensors"
"""What AutoGPTQ calls the only file of a checkpoint, after its bits and groups."""
_MAX_INDEX_BYTES: Final = 64 * 2**20
_MAX_SHARDS: Final = 10_000


def safetensors_files(folder: Path) -> tuple[list[Path], dict[str, str]] | None:
    """List the safetensors files of a checkpoint folder.

    Returns:
        The files in a fixed order, and the index: file name by tensor name; empty if there is no index. None if there
        are no such files.

    Raises:
        WeightsError: the index is broken, or it names a file that does not exist or is outside the folder.
    """
    return _stored_as(folder, SINGLE_NAME, INDEX_NAME, _GPTQ_NAMES)


def pickle_files(folder: Path) -> tuple[list[Path], dict[str, str]] | None:
    """List the pickle files of a checkpoint folder; as `safetensors_files`."""
    return _stored_as(folder, *PICKLES)


def _stored_as(
    folder: Path, single_name: str, index_name: str, other_names: str = ""
) -> tuple[list[Path], dict[str, str]] | None:
    """List files and index, of one kind; None if there are none.

    Args:
        folder: the checkpoint folder.
        single_name: of the file of an unsharded checkpoint.
        index_name: of the index of a sharded one.
        other_names: pattern of further names of a single file; "" for none.
    """
    suffix = Path(single_name).suffix
    if os.path.lexists(folder / single_name):
        return [_inside(folder, single_name, "the model folder", suffix)], {}
    content = read_json_object(folder, index_name, _MAX_INDEX_BYTES, WeightsError)
    named = sorted(folder.glob(other_names)) if content is None and other_names else []
    if len(named) == 1:
        return [_inside(folder, named[0].name, "the model folder", suffix)], {}
    if content is None:
        return None
    index, weight_map = folder / index_name, content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index} has no weight_map, which says what file holds which tensor")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise WeightsError(f"{index}: every value of weight_map must be the name of a file")
    names = sorted(set(weight_map.values()))
    if len(names) > _MAX_SHARDS:
        raise WeightsError(f"{index} names {len(names)} files; at most {_MAX_SHARDS} are opened")
    return [_inside(folder, name, str(index), suffix) for name in names], weight_map


def _inside(folder: Path, name: str, named_by: str, suffix: str) -> Path:
    """Return the path of the file `name` in the folder.

    Raises:
        WeightsError: `name` is not a file of weights with the suffix in the folder, or none that may be opened.
    """
    if Path(name).name != name or "\\" in name or Path(name).suffix != suffix:
        raise WeightsError(
            f"{named_by} names the file {name!r}; only plain names of {suffix} files are opened"
        )
    file = folder / name
    if not os.path.lexists(file):
        raise WeightsError(f"{named_by} names {name}, which is not in {folder}")
    with open_file(folder, name, WeightsError):
        return file
