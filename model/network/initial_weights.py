"""Initial weights of a model, for training and for dummy weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.fp8 import quantize_rows

if TYPE_CHECKING:
    from torch import nn


def initialize(model: nn.Module, std: float, generator: torch.Generator | None = None) -> None:
    """Initialize the parameters: matrices from a normal distribution, biases 0, norms 1.

    Args:
        model: its float8_e4m3fn parameters have a buffer of scales each, named after them.
        std: standard deviation.
        generator: of the parameters' device; None uses PyTorch's global generator.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dtype is torch.float8_e4m3fn:
                # PyTorch has no normal_ for float8.
                values = torch.empty(parameter.shape, device=parameter.device)
                numbers, scale = quantize_rows(values.normal_(0.0, std, generator=generator))
                parameter.copy_(numbers)
                model.get_buffer(f"{name}_scale").copy_(scale)
            elif parameter.ndim > 1:
                parameter.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)
