"""Linear layers on the CPU over weights in the blocked layout of oneDNN.

A row-major weight goes through the general matrix multiplication: on two cores of an AMD EPYC (Zen 5),
float32, that takes 3.2 times as long for one row of a step and 3.4 times for eight.
docs/decisions/0004-cpu-dtype.md has the figures. Knows matrices, not what they mean.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor
from torch.nn import functional

# Operators without a public name: torch's own compiler emits them for weights frozen on the CPU.
_MKLDNN = torch.ops.mkldnn


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by a weight in either layout.

    Args:
        x: [..., in].
        weight: [out, in], row-major or from `pack`; a packed one has no gradients.
        bias: [out] or None.

    Returns:
        [..., out] in x's dtype.
    """
    if weight.is_mkldnn:
        packed: Tensor = _MKLDNN._linear_pointwise.default(x, weight, bias, "none", [], "")  # noqa: SLF001
        return packed
    return functional.linear(x, weight, bias)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether `pack` gains anything: x86 with the vector instructions oneDNN needs for the dtype."""
    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(_MKLDNN._is_mkldnn_bf16_supported())  # noqa: SLF001
    return dtype is torch.float32


def pack(weight: Tensor) -> Tensor:
    """Copy a weight into the blocked layout.

    Args:
        weight: [out, in] row-major, of a dtype that `can_pack` accepts.

    Returns:
        An opaque tensor of the same shape for `linear`; `to_dense` undoes it.
    """
    packed: Tensor = _MKLDNN._reorder_linear_weight(weight.detach())  # noqa: SLF001
    return packed
