"""The matrix of a layer as a module: its tensors are parameters and buffers, in any format; a rank's part."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from kernels.weight_format import unquantized
from kernels.weights import Weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.network.parallel import Section

Divisible = TypeVar("Divisible", Tensor, Weight)


class Matrix(nn.Module):
    """A matrix [N, C]; only full numbers can be trained.

    Args:
        empty: its tensors, whose values are written later; they may be views.
    """

    numbers: nn.Parameter

    def __init__(self, empty: Weight) -> None:
        super().__init__()
        self._form, self._shape = empty.format, empty.shape
        self.numbers = nn.Parameter(empty.numbers, requires_grad=not self._form.is_quantized)
        for name, tensor in empty.tensors.items():
            if name != "numbers":
                self.register_buffer(name, tensor)

    @property
    def weight(self) -> Weight:
        """The matrix, whose tensors are this module's; `to` may have changed the dtype of full numbers."""
        is_quantized = self._form.is_quantized
        form = self._form if is_quantized else unquantized(self.numbers.dtype)
        return Weight(form, self._shape, self.numbers, **dict(self.named_buffers(recurse=False)))


def shard(whole: Divisible, shape: Sequence[int], rank: int) -> Divisible:
    """Return a rank's part of a tensor or matrix, a view.

    Args:
        whole: any shape.
        shape: of the part. Dimensions that are smaller than those of `whole` are divided among the ranks. If there
            is a remainder, the last part begins earlier and repeats the end of the one before.
        rank: of the part.
    """
    for dim, (size, whole_size) in enumerate(zip(shape, whole.shape, strict=True)):
        if size != whole_size:
            whole = whole.narrow(dim, min(rank * size, whole_size - size), size)
    return whole


def shard_sections(whole: Divisible, of: Sequence[Section], rank: int) -> Divisible:
    """Return a rank's rows of each section of a tensor or matrix; a view if there is one section, else a copy.

    Args:
        whole: [sum of whole, ...].
        of: its sections, in order.
        rank: of the part.
    """
    ends = itertools.accumulate(it.whole for it in of)
    starts = [
        end - it.whole + rank // it.num_ranks * it.rows for it, end in zip(of, ends, strict=True)
    ]
    if len(of) == 1:
        return whole.narrow(0, starts[0], of[0].rows)
    ranges = (torch.arange(it, it + section.rows) for it, section in zip(starts, of, strict=True))
    index = torch.cat(list(ranges))
    return whole[index] if isinstance(whole, Tensor) else whole.permuted(index)
