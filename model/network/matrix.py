"""The matrix of a layer as a module: its tensors are parameters and buffers, in any format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from kernels.weight_format import WeightFormat, unquantized
from kernels.weights import Weight

if TYPE_CHECKING:
    import torch


class Matrix(nn.Module):
    """A matrix [N, C] without values; only full numbers can be trained."""

    numbers: nn.Parameter

    def __init__(self, form: WeightFormat, shape: tuple[int, int], device: torch.device) -> None:
        super().__init__()
        self._form, self._shape = form, shape
        empty = Weight.empty(form, shape, device)
        self.numbers = nn.Parameter(empty.numbers, requires_grad=not form.is_quantized)
        for name, tensor in empty.tensors.items():
            if name != "numbers":
                self.register_buffer(name, tensor)

    @property
    def weight(self) -> Weight:
        """The matrix, whose tensors are this module's; `to` may have changed the dtype of full numbers."""
        is_quantized = self._form.is_quantized
        form = self._form if is_quantized else unquantized(self.numbers.dtype)
        return Weight(form, self._shape, self.numbers, **dict(self.named_buffers(recurse=False)))
