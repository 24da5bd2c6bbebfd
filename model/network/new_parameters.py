"""Makes the parameters of a layer in their dtypes and formats."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import nn

from kernels.stacked import can_be_stacked, empty_stacked
from kernels.weight_format import WeightFormat, unquantized
from kernels.weights import Weight
from model.network.matrix import Matrix

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model.network.spec import Layer
    from model.network.spec import Norm as NormSpec


def norm_dtype(norm: NormSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the weight of a norm in a model of dtype `dtype`."""
    return torch.float32 if norm.float32 else dtype


def stacked_rows(layer: Layer, parameter: str) -> list[int] | None:
    """Return the rows of each projection that a parameter of a layer stacks; None if it holds only one."""
    if parameter == "activation":
        return [1] * layer.mlp.num_activation
    matrices = {**layer.mixer.matrices(0), **layer.mlp.matrices(0)}
    name = parameter.removesuffix(".numbers").removesuffix("_bias")
    rows, _ = matrices.get(name, ((), 0))
    return list(rows) if len(rows) > 1 else None


class NewParameters:
    """Makes the parameters of a layer; arguments are those of `DecoderLayer`."""

    def __init__(
        self,
        layer: Layer,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightFormat | Mapping[str, WeightFormat] | None,
    ) -> None:
        self.hidden = hidden
        self._layer, self._dtype, self._device = layer, dtype, device
        self._weight_format = weight_format

    def vector(self, *shape: int) -> nn.Parameter:
        """Return a vector, such as a bias, or another array that is no matrix of a product."""
        return nn.Parameter(torch.empty(shape, dtype=self._dtype, device=self._device))

    def float32(self, size: int) -> nn.Parameter:
        """Return a vector that is float32 in every model."""
        return nn.Parameter(torch.empty(size, dtype=torch.float32, device=self._device))

    def norm(self, size: int, of: NormSpec | None = None) -> nn.Parameter:
        """Return the weight of a norm; None for one as those of the layer."""
        dtype = norm_dtype(of or self._layer.norm, self._dtype)
        return nn.Parameter(torch.empty(size, dtype=dtype, device=self._device))

    def full(self, rows: int, columns: int) -> nn.Parameter:
        """Return a matrix, [rows, columns], that is too small to be held in another format."""
        return nn.Parameter(torch.empty(rows, columns, dtype=self._dtype, device=self._device))

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """Return the matrix of a name, [rows, columns], in its format."""
        return Matrix(Weight.empty(self._format(name, rows), (rows, columns), self._device))

    def matrices_in_one(self, rows: Mapping[str, int], columns: int) -> dict[str, Matrix]:
        """Return the matrices of some names, [rows, columns] each, stored as one if their formats are the same."""
        first, *others = (self._format(name, count) for name, count in rows.items())
        counts = [*rows.values()]
        if any(it != first for it in others) or not can_be_stacked(first, counts):
            return {name: self.matrix(name, count, columns) for name, count in rows.items()}
        parts = empty_stacked(first, counts, columns, self._device)
        return {name: Matrix(part) for name, part in zip(rows, parts, strict=True)}

    def _format(self, name: str, rows: int) -> WeightFormat:
        formats = self._weight_format
        if isinstance(formats, WeightFormat):
            stacked = stacked_rows(self._layer, name) or [rows]
            return formats.divided(0, *itertools.accumulate(stacked[:-1]))
        return (formats or {}).get(name) or unquantized(self._dtype)
