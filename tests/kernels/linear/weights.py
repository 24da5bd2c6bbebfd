"""The parameters of a linear layer from plain tensors."""

import torch

from kernels.linear.weights import LinearWeights
from kernels.weight_format import FP8_ROWS
from kernels.weights import Weight


def linear_weights(numbers, bias=None, scale=None):
    """Return parameters: full numbers, or FP8 with a scale for each output."""
    if scale is None and numbers.dtype is not torch.float8_e4m3fn:
        return LinearWeights(Weight.full(numbers), bias)
    return LinearWeights(Weight(FP8_ROWS, tuple(numbers.shape), numbers, scale), bias)
