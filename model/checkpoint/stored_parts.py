"""The vectors and matrices of a checkpoint, each of one or, if it is quantized, of several tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from torch import Tensor

from kernels.weight_format import WeightFormat, unquantized
from kernels.weights import Weight
from model.checkpoint.formats.format import FLOAT_DTYPES, FLOATS, UNUSED, Format, StoredTensor
from model.checkpoint.formats.table import StoredFormat, StoredFormats
from model.checkpoint.input_order import order_of_groups
from model.errors import WeightsError

PartValues: TypeAlias = Weight | Tensor


class StoredPart(NamedTuple):
    """A vector or a matrix of a checkpoint.

    Attributes:
        name: of its tensor in the files, of that of the numbers if it is quantized.
        entry: of that tensor.
        shape: of the vector or matrix.
        form: of a quantized matrix; else None.
        scales: name and entry of its other tensors, by the keys of `Format.tensors`.
        row: reads a quantized matrix; else None.
        order: as `Weight.order`.
        finish: changes the values that were read, but neither shape nor format; None for no change.
    """

    name: str
    entry: StoredTensor
    shape: tuple[int, ...]
    form: WeightFormat | None = None
    scales: Mapping[str, tuple[str, StoredTensor]] = MappingProxyType({})
    row: Format | None = None
    order: Tensor | None = None
    finish: Callable[[PartValues], PartValues] | None = None

    def empty(self) -> Weight:
        """Return the matrix without memory for its values."""
        outputs, inputs = self.shape
        form = self.form or unquantized(FLOAT_DTYPES[self.entry.dtype])
        made = Weight.empty(form, (outputs, inputs), "meta")
        return dataclasses.replace(made, order=self.order)

    def read(self, tensor: Tensor, scales: Mapping[str, Tensor]) -> PartValues:
        """Return it from its tensor and those of all scales, by their names.

        Raises:
            WeightsError: their values do not fit each other.
        """
        values = self._read(tensor, scales)
        return values if self.finish is None else self.finish(values)

    def _read(self, tensor: Tensor, scales: Mapping[str, Tensor]) -> PartValues:
        if self.form is None or self.row is None:
            return Weight.full(tensor) if tensor.ndim == 2 else tensor
        outputs, inputs = self.shape
        others = {part: scales[name] for part, (name, _) in self.scales.items()}
        form = dataclasses.replace(self.form, ordered=False)
        try:
            made = self.row.read(form, (outputs, inputs), {"numbers": tensor, **others})
        except ValueError as error:
            raise WeightsError(f"{self.entry.file}: {self.name} {error}") from None
        return made if self.order is None else made.with_columns_sorted(self.order)


def combine(headers: Mapping[str, StoredTensor], stored: StoredFormats) -> dict[str, StoredPart]:
    """Combine the tensors of each quantized matrix.

    Args:
        headers: the tensors, by their names in the files.
        stored: how the checkpoint stores its matrices.

    Returns:
        Vectors and matrices by the names that their tensors have, or would have if they were not quantized. Tensors
        that round activations (`UNUSED`) are left out.

    Raises:
        WeightsError: tensors do not fit each other.
    """
    if not stored.formats:
        return {name: StoredPart(name, entry, entry.shape) for name, entry in headers.items()}
    parts: dict[str, StoredPart] = {}
    used: set[str] = set()
    for name, entry in headers.items():
        if ways := [it for it in stored.formats if _has_numbers(it.row, name, entry)]:
            module = name.removesuffix(f".{ways[0].row.tensors['numbers']}")
            part = _matrix(headers, name, _chosen(ways, module, entry), module)
            used.update((name, *(it for it, _ in part.scales.values())))
            parts[f"{module}.weight"] = part
    names = " or ".join(dict.fromkeys(it.row.dtype_name for it in stored.formats))
    ends = tuple(
        f".{end}"
        for it in stored.formats
        for key, end in it.row.tensors.items()
        if key != "numbers"
    )
    for name, entry in headers.items():
        if name in used or name.rpartition(".")[2] in UNUSED:
            continue
        if name.endswith(ends) or entry.dtype not in FLOATS:
            raise WeightsError(f"{entry.file}: {name} belongs to no {names} tensor")
        parts[name] = StoredPart(name, entry, entry.shape)
    return parts


def _has_numbers(row: Format, name: str, entry: StoredTensor) -> bool:
    """Whether a tensor has the numbers of a matrix: full numbers may have the same name."""
    return name.endswith(f".{row.tensors['numbers']}") and entry.dtype == row.dtype


def _chosen(ways: list[StoredFormat], module: str, entry: StoredTensor) -> StoredFormat:
    """Return the way in which a module's matrix is stored, by the targets of groups if its tensors do not tell."""
    if len({(it.row.name, it.form) for it in ways}) == 1:
        return ways[0]
    ranks = {
        rank: it for it in reversed(ways) if it.part and (rank := it.part.rank(module)) is not None
    }
    if not ranks:
        raise WeightsError(
            f"{entry.file}: {module} is quantized, but is no target of config_groups"
        )
    return ranks[min(ranks)]


def _matrix(
    headers: Mapping[str, StoredTensor], name: str, way: StoredFormat, module: str
) -> StoredPart:
    """Return the matrix whose numbers a tensor has."""
    entry, row = headers[name], way.row
    if len(entry.shape) != 2:
        raise WeightsError(
            f"{entry.file}: {name} is {row.dtype_name} of shape {list(entry.shape)}; only matrices may be"
        )
    what = f"{entry.file}: {name} is {row.dtype_name} with {entry.shape[0]} rows"
    others = {
        key: it
        for key, end in row.tensors.items()
        if key != "numbers" and ((it := f"{module}.{end}") in headers or key not in row.optional)
    }
    if missing := [it for it in others.values() if it not in headers]:
        raise WeightsError(f"{what}; {missing[0]}, which belongs to it, is missing")
    scales = {key: (it, headers[it]) for key, it in others.items()}
    try:
        entries = {key: it for key, (_, it) in scales.items()}
        shape = row.shape(way.form, {"numbers": entry, **entries})
        form = row.refine(way.form, shape, {"numbers": entry, **entries})
        groups = entries["order"].values if "order" in entries else None
        order = None if groups is None else order_of_groups(groups, way.form.group or shape[1])
    except ValueError as error:
        found = "".join(f"; {it} is {list(x.shape)} {x.dtype}" for it, x in scales.values())
        raise WeightsError(f"{what}, {error}{found}") from None
    form = dataclasses.replace(form, ordered=order is not None)
    return StoredPart(name, entry, shape, form, scales, row, order)
