"""Functions of single elements whose bits do not depend on the elements beside them, unlike `functional.silu`'s.

On a CPU, PyTorch computes the last elements of a tensor one by one, and rounds SiLU, sigmoid and softplus otherwise
than in vectors. `torch.exp` and `torch.log1p` give equal bits in both.
"""

from __future__ import annotations

import torch
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    """Multiply float32 elements by their sigmoid."""
    return x / (1.0 + torch.exp(-x))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) of float32 elements."""
    return 1.0 / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) of float32 elements, without overflow."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))
