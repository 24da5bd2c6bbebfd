"""The vectors and matrices of a checkpoint, each of one or, if it is quantized, of several tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from torch import Tensor

from kernels.weight_format import WeightFormat, unquantized
from kernels.weights import Weight
from model.checkpoint.formats.format import FLOATS, Format, StoredTensor
from model.checkpoint.formats.table import find
from model.errors import WeightsError

PartValues: TypeAlias = Weight | Tensor


class StoredPart(NamedTuple):
    """A vector or a matrix of a checkpoint.

    Attributes:
        name: of its tensor in the files, of that of the numbers if it is quantized.
        entry: of that tensor.
        shape: of the vector or matrix.
        form: of a quantized matrix; else None.
        scales: name and entry of its other tensors, by the attributes of `Weight`.
        finish: changes the values that were read, but neither shape nor format; None for no change.
    """

    name: str
    entry: StoredTensor
    shape: tuple[int, ...]
    form: WeightFormat | None = None
    scales: Mapping[str, tuple[str, StoredTensor]] = MappingProxyType({})
    finish: Callable[[PartValues], PartValues] | None = None

    def empty(self) -> Weight:
        """Return the matrix without memory for its values."""
        outputs, inputs = self.shape
        return Weight.empty(self.form or unquantized("float32"), (outputs, inputs), "meta")

    def read(self, tensor: Tensor, scales: Mapping[str, Tensor]) -> PartValues:
        """Return it from its tensor and those of all scales, by their names."""
        values = self._read(tensor, scales)
        return values if self.finish is None else self.finish(values)

    def _read(self, tensor: Tensor, scales: Mapping[str, Tensor]) -> PartValues:
        row = find(self.form)
        if self.form is None or row is None:
            return tensor if tensor.ndim == 1 else Weight.full(tensor)
        outputs, inputs = self.shape
        others = {part: scales[name] for part, (name, _) in self.scales.items()}
        return row.read(self.form, (outputs, inputs), {"numbers": tensor, **others})


def combine(
    headers: Mapping[str, StoredTensor], form: WeightFormat | None
) -> dict[str, StoredPart]:
    """Combine the tensors of each quantized matrix.

    Args:
        headers: the tensors, by their names in the files.
        form: of the checkpoint's matrices; None for full numbers.

    Returns:
        Vectors and matrices by the names that their tensors have, or would have if they were not quantized.

    Raises:
        WeightsError: tensors do not fit each other.
    """
    row = find(form)
    if form is None or row is None:
        return {name: StoredPart(name, entry, entry.shape) for name, entry in headers.items()}
    ends = {part: f".{end}" for part, end in row.tensors.items()}
    numbers = ends.pop("numbers")
    parts: dict[str, StoredPart] = {}
    used: set[str] = set()
    for name, entry in headers.items():
        if not _has_numbers(row, name, entry):
            continue
        if len(entry.shape) != 2:
            raise WeightsError(
                f"{entry.file}: {name} is {form.dtype} of shape {list(entry.shape)}; only matrices may be"
            )
        what = f"{entry.file}: {name} is {form.dtype} with {entry.shape[0]} rows"
        module = name.removesuffix(numbers)
        others = {
            part: module + end
            for part, end in ends.items()
            if module + end in headers or part not in row.optional
        }
        used.update(others.values())
        if missing := [it for it in others.values() if it not in headers]:
            raise WeightsError(f"{what}; {missing[0]}, which belongs to it, is missing")
        scales = {part: (it, headers[it]) for part, it in others.items()}
        try:
            entries = {part: it for part, (_, it) in scales.items()}
            shape = row.shape(form, {"numbers": entry, **entries})
        except ValueError as error:
            found = "".join(f"; {it} is {list(x.shape)} {x.dtype}" for it, x in scales.values())
            raise WeightsError(f"{what}, {error}{found}") from None
        parts[f"{module}.weight"] = StoredPart(name, entry, shape, form, scales)
    for name, entry in headers.items():
        if name in used or _has_numbers(row, name, entry):
            continue
        if name.endswith(tuple(ends.values())) or entry.dtype not in FLOATS:
            raise WeightsError(f"{entry.file}: {name} belongs to no {form.dtype} tensor")
        parts[name] = StoredPart(name, entry, entry.shape)
    return parts


def _has_numbers(row: Format, name: str, entry: StoredTensor) -> bool:
    """Whether a tensor has the numbers of a matrix: full numbers may have the same name."""
    return name.endswith(f".{row.tensors['numbers']}") and entry.dtype == row.dtype
