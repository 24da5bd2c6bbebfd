"""Matrices with the same inputs that are stored as the rows of one, so that one product computes all of them.

Each stays a matrix, of views, which loading and saving read and write.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kernels.weights import Weight

if TYPE_CHECKING:
    import torch

    from kernels.weight_format import WeightFormat

ROW_MULTIPLE: Final = 128
"""Of which the rows are a multiple, the last of them zeros: products on tensor cores have tiles of as many outputs, and
each row of the result begins at a multiple of 16 bytes."""


def can_be_stacked(form: WeightFormat, rows: Sequence[int]) -> bool:
    """Whether matrices of a format with these numbers of rows share no scales, and have no order of their inputs."""
    ends = itertools.accumulate(rows)
    return not form.ordered and form.divided(0, *ends) == form


def empty_stacked(
    form: WeightFormat, rows: Sequence[int], inputs: int, device: torch.device
) -> list[Weight]:
    """Allocate matrices without values, [rows, inputs] each, as the rows of one; `can_be_stacked` must hold."""
    ends = [0, *itertools.accumulate(rows)]
    padded = _padded(ends[-1])
    whole = Weight.empty(form, (padded, inputs), device)
    if padded > ends[-1]:
        for tensor in whole.rows(ends[-1], padded).tensors.values():
            tensor.zero_()
    return [whole.rows(start, stop) for start, stop in itertools.pairwise(ends)]


def _padded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def stacked(first: Weight, second: Weight) -> Weight | None:
    """Return the matrix of which `empty_stacked` has made two the rows, a view; None if they are not stored as one."""
    if first.format != second.format:
        return None
    parts = {}
    for name, tensor in first.tensors.items():
        below, storage = second.tensors[name], tensor.untyped_storage()
        is_beside = below.untyped_storage().data_ptr() == storage.data_ptr()
        if tensor.storage_offset() or not is_beside or below.storage_offset() != tensor.numel():
            return None
        shape = (storage.nbytes() // tensor.itemsize // tensor[0].numel(), *tensor.shape[1:])
        parts[name] = tensor.detach().as_strided(shape, tensor.stride(), 0)
    rows = len(parts["numbers"])
    if rows != _padded(first.shape[0] + second.shape[0]):
        return None  # the memory holds something else too
    return Weight(first.format, (rows, first.shape[1]), **parts)
