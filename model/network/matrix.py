"""The matrix of a layer as a module: its tensors are parameters and buffers, in any format."""

from __future__ import annotations

from torch import nn

from kernels.weight_format import unquantized
from kernels.weights import Weight


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
