"""The vectors and matrices of a GGUF checkpoint, by the names that the tensors of a folder would have."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kernels.weights import Weight
from model.checkpoint.formats.format import StoredTensor
from model.checkpoint.formats.gguf import row_of
from model.checkpoint.stored_parts import PartValues, StoredPart
from model.errors import ModelError, WeightsError
from model.gguf.architectures import (
    CONVOLUTIONS,
    DECAYS,
    ROPE_FACTORS,
    VECTORS,
    Architecture,
    TiledHeads,
    find_architecture,
)
from model.gguf.config import without_effect
from model.gguf.heads import head_dim
from model.gguf.reader import TensorEntry, map_file, read_header
from model.gguf.source import Source

_OUTSIDE: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER: Final = re.compile(
    r"blk\.(?P<index>\d{1,4})\.(?P<module>\w+(?:\.\w+)??)(?:\.(?P<end>weight|bias))?"
)
_MATRIX: Final = 2
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_logger = logging.getLogger(__name__)


def gguf_parts(file: Path) -> dict[str, StoredPart]:
    """Return the parts of a checkpoint; tensors that have no name in a folder keep theirs.

    Raises:
        WeightsError: a quantized tensor is no matrix, or rows do not fit the heads.
        ModelError: the file is damaged or not supported.
    """
    source = Source(file)
    architecture, dims = find_architecture(source), head_dim(source)
    if keys := without_effect(source):
        _logger.warning("%s: %s have no effect here", file, ", ".join(keys))
    parts, tiled = {}, architecture.tiled(source)
    for name, entry in source.tensors.items():
        if name in ROPE_FACTORS:
            continue
        module = _module(name)
        finish = _finish(architecture, module, dims, tiled)
        if module in architecture.permuted and entry.shape[0] % dims:
            raise WeightsError(
                f"{entry.file}: {name} has {entry.shape[0]} rows, no multiple of the {dims} of a head"
            )
        stored = _stored(name, entry)
        parts[_full_name(architecture, name)] = StoredPart(
            name,
            stored,
            _shape(module, stored.shape if entry.kind.form is None else entry.shape),
            entry.kind.form,
            row=row_of(entry.kind),
            finish=finish,
        )
    return parts


class GGUFShard:
    """Reads the tensors of one file, as views of the mapped file.

    Args:
        file: the file.
        content: the whole file, mapped.
    """

    def __init__(self, file: Path, content: bytearray) -> None:
        self._content = content
        self._tensors = read_header(file).tensors

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor of full numbers, or the bytes of the rows of a quantized one."""
        entry = self._tensors[name]
        dtype = _DTYPES.get(entry.kind.name, torch.uint8)
        count = entry.num_bytes // dtype.itemsize
        values = torch.frombuffer(self._content, dtype=dtype, count=count, offset=entry.start)
        return values.view(_stored(name, entry).shape)


@contextlib.contextmanager
def open_gguf(file: Path) -> Iterator[GGUFShard]:
    """Map a GGUF file into memory.

    Raises:
        WeightsError: it cannot be read.
    """
    try:
        with map_file(file) as content:
            yield GGUFShard(file, content)  # type: ignore[arg-type] # a buffer
    except WeightsError:
        raise
    except ModelError as error:
        raise WeightsError(str(error)) from None


def _stored(name: str, entry: TensorEntry) -> StoredTensor:
    """Return the entry of a tensor as its bytes are read."""
    kind = entry.kind
    if kind.form is None:
        is_vector = _module(name) in VECTORS
        shape = (math.prod(entry.shape),) if is_vector else entry.shape
        return StoredTensor(entry.file, shape, kind.name)
    if len(entry.shape) != 2:
        raise WeightsError(
            f"{entry.file}: {name} is {kind.name} of shape {list(entry.shape)}; only matrices may be"
        )
    rows, columns = entry.shape
    return StoredTensor(entry.file, (rows, columns // kind.block * kind.num_bytes), "U8")


def _module(name: str) -> str:
    found = _IN_LAYER.fullmatch(name)
    return found["module"] if found else name.rpartition(".")[0]


def _full_name(architecture: Architecture, name: str) -> str:
    if found := _IN_LAYER.fullmatch(name):
        module = architecture.layers.get(found["module"])
        if module is None:
            return name
        full = f"model.layers.{int(found['index'])}.{module}"
        # Falcon-H1's norms before the MLP are `ffn_norm` alone.
        end = found["end"] or "weight"
        return full if found["module"] in architecture.whole else f"{full}.{end}"
    module, _, end = name.rpartition(".")
    outside = _OUTSIDE | {**architecture.outside}
    return f"{outside[module]}.{end}" if module in outside else name


def _shape(module: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a tensor would have in a folder."""
    if module in CONVOLUTIONS and len(shape) == _MATRIX:
        return (shape[0], 1, shape[1])
    return shape


def _finish(
    architecture: Architecture, module: str, dims: int, tiled: Mapping[str, TiledHeads]
) -> Callable[[PartValues], PartValues] | None:
    """Return what makes the values of a folder of those of a file; None if they are the same."""
    if module in architecture.plus_one:
        return _less_one
    if module in DECAYS or module in tiled:
        heads, is_decay = tiled.get(module), module in DECAYS

        def finish(values: PartValues) -> PartValues:
            if is_decay:
                assert isinstance(values, Tensor), "a vector"
                values = (-values.float()).log()
            return values if heads is None else _grouped(values, heads)

        return finish
    if module not in architecture.permuted:
        return None
    order = torch.tensor((*range(0, dims, 2), *range(1, dims, 2)))

    def permute(values: PartValues) -> PartValues:
        index = (torch.arange(0, values.shape[0], dims)[:, None] + order).flatten()
        return values[index] if isinstance(values, Tensor) else values.permuted(index)

    return permute


def _grouped(values: PartValues, heads: TiledHeads) -> PartValues:
    """Return values whose heads are in the order of a folder."""
    dim = 1 if heads.columns else 0
    count = (values.shape[dim] - heads.first) // heads.size
    tiles = torch.arange(count).view(-1, heads.key_heads)
    order = tiles.t().flatten()
    if heads.columns:
        assert isinstance(values, Weight), "a matrix"
        return _with_columns(values, order)
    rows = heads.first + (order[:, None] * heads.size + torch.arange(heads.size)).flatten()
    index = torch.cat((torch.arange(heads.first), rows))
    return values[index] if isinstance(values, Tensor) else values.permuted(index)


def _with_columns(weight: Weight, order: Tensor) -> Weight:
    """Return a matrix whose columns are those of equal parts of this one in an order; scales stay with their numbers.

    Raises:
        WeightsError: scales would be divided.
    """
    size = weight.shape[1] // len(order)
    if weight.format.group and size % weight.format.group:
        raise WeightsError(
            f"heads of {size} values divide groups of {weight.format.group}, which is not supported"
        )

    def parts(tensor: Tensor) -> Tensor:
        if tensor.ndim == 1 or tensor.shape[1] % len(order):
            return tensor
        return tensor.view(len(tensor), len(order), -1)[:, order].flatten(1)

    scales = {name: parts(it) for name, it in weight.scales.items()}
    return Weight(weight.format, weight.shape, parts(weight.numbers), **scales)


def _less_one(values: PartValues) -> PartValues:
    assert not isinstance(values, Weight), "of norms"
    return values.float() - 1
