"""Initial weights of a model, for training and for dummy weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.fp8 import quantize_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


def initialize(
    model: nn.Module,
    std: float,
    generator: torch.Generator | None = None,
    shapes: dict[str, torch.Size] | None = None,
    shard: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Initialize the parameters: matrices from a normal distribution, biases 0, norms 1.

    Args:
        model: its float8_e4m3fn parameters have a buffer of scales each, named after them.
        std: standard deviation.
        generator: of the parameters' device; None uses PyTorch's global generator.
        shapes: for a model with a part of each matrix, the shapes of the whole parameters; it gets that part of the
            numbers which a whole model would have.
        shard: returns the model's part of a whole parameter, by its name; with `shapes`.
    """

    def normal(name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        shape = parameter.shape if shapes is None else shapes[name]
        values = torch.empty(shape, dtype=dtype, device=parameter.device)
        values.normal_(0.0, std, generator=generator)
        return values if shard is None else shard(name, values)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dtype is torch.float8_e4m3fn:
                # PyTorch has no normal_ for float8.
                numbers, scale = quantize_rows(normal(name, parameter, torch.float32))
                parameter.copy_(numbers)
                model.get_buffer(f"{name}_scale").copy_(scale)
            elif parameter.ndim > 1 and shapes is not None:
                parameter.copy_(normal(name, parameter, parameter.dtype))
            elif parameter.ndim > 1:
                parameter.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)
