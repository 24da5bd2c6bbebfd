"""Initial weights of a model, for training and for dummy weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.weights import Weight
from model.network.matrix import Matrix

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
        model: may have `Matrix` modules in any format.
        std: standard deviation.
        generator: of the parameters' device; None uses PyTorch's global generator.
        shapes: for a model with a part of each matrix, the shapes of the whole parameters; it gets that part of the
            numbers which a whole model would have.
        shard: returns the model's part of a whole parameter, by its name; with `shapes`.
    """

    def normal(name: str, parameter: Tensor | Weight, dtype: torch.dtype) -> Tensor:
        shape = parameter.shape if shapes is None else shapes[name]
        values = torch.empty(shape, dtype=dtype, device=device)
        values.normal_(0.0, std, generator=generator)
        return values if shard is None else shard(name, values)

    device = next(model.parameters()).device
    matrices = {
        f"{name}.numbers": module.weight
        for name, module in model.named_modules()
        if isinstance(module, Matrix) and module.weight.format.is_quantized
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (matrix := matrices.get(name)) is not None:
                matrix.copy_(Weight.full(normal(name, matrix, torch.float32)))
            elif parameter.ndim > 1 and shapes is not None:
                parameter.copy_(normal(name, parameter, parameter.dtype))
            elif parameter.ndim > 1:
                parameter.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)
