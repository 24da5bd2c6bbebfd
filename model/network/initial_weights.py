"""Initial weights of a model, for training and for dummy weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from torch import Tensor

from kernels.weights import Weight
from model.network.matrix import Matrix

if TYPE_CHECKING:
    from torch import nn


def _fill_conv(parameter: Tensor, generator: torch.Generator | None) -> None:
    """Fill the taps of a convolution, [channels, W], so that the sizes of results are those of its inputs."""
    parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)


def _fill_a_log(parameter: Tensor, _generator: torch.Generator | None) -> None:
    """Fill the logarithms of decay rates from 1 to 16."""
    parameter.copy_(torch.linspace(1, 16, len(parameter), device=parameter.device).log())


def _fill_dt_bias(parameter: Tensor, _generator: torch.Generator | None) -> None:
    """Fill biases whose softplus, the step size, is from 0.001 to 0.1 in a geometric series."""
    bounds = (math.log(1e-3), math.log(1e-1))
    steps = torch.linspace(*bounds, len(parameter), device=parameter.device).exp()
    parameter.copy_(steps + (-(-steps).expm1()).log())


_Fill: TypeAlias = Callable[[Tensor, "torch.Generator | None"], None]
_RECURRENT: Final[dict[str, _Fill]] = {
    "conv": _fill_conv,
    "a_log": _fill_a_log,
    "dt_bias": _fill_dt_bias,
}
"""The parameters of recurrent mixers by name.

Source: Gu and Dao, Mamba, 2023 (arXiv 2312.00752), section 3.6; Dao and Gu, Transformers are SSMs, 2024.
"""


def initialize(
    model: nn.Module,
    std: float,
    generator: torch.Generator | None = None,
    shapes: dict[str, torch.Size] | None = None,
    shard: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Initialize the parameters: matrices from a normal distribution, biases 0, norms 1.

    Those of recurrent mixers begin so that heads forget at different speeds, whatever `std` is.

    Args:
        model: may have `Matrix` modules in any format.
        std: standard deviation.
        generator: of the parameters' device; None uses PyTorch's global generator.
        shapes: for a model with a part of each matrix, the shapes of the whole parameters; it gets that part of the
            numbers which a whole model would have.
        shard: returns the model's part of a whole parameter, by its name; with `shapes`.
    """

    def filled(name: str, parameter: Tensor | Weight, dtype: torch.dtype, fill: _Fill) -> Tensor:
        shape = parameter.shape if shapes is None else shapes[name]
        values = torch.empty(shape, dtype=dtype, device=device)
        fill(values, generator)
        return values if shard is None else shard(name, values)

    def normal(values: Tensor, its: torch.Generator | None) -> None:
        values.normal_(0.0, std, generator=its)

    device = next(model.parameters()).device
    matrices = {
        f"{name}.numbers": module.weight
        for name, module in model.named_modules()
        if isinstance(module, Matrix) and module.weight.format.is_quantized
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill = _RECURRENT.get(name.rpartition(".")[2], normal if parameter.ndim > 1 else None)
            if (matrix := matrices.get(name)) is not None:
                matrix.copy_(Weight.full(filled(name, matrix, torch.float32, normal)))
            elif fill is not None and shapes is not None:
                parameter.copy_(filled(name, parameter, parameter.dtype, fill))
            elif fill is not None:
                fill(parameter, generator)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)
