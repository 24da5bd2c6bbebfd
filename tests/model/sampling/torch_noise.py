"""The noise of tokens in PyTorch, by the recipe of `kernels.sampling.noise`."""

from __future__ import annotations

from torch import Tensor, log, log1p

from kernels.sampling.noise import FIRST_FACTOR, ID_STEP, LARGEST_FRACTION, SECOND_FACTOR

_MASK32 = (1 << 32) - 1


def gumbel_noise(ids: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the noise of tokens, float32, in PyTorch.

    Args:
        ids: [n] or [R, n] int64, >= 0.
        low: [R, 1] float64, from `noise_key` of each row.
        high: likewise.

    Returns:
        [R, n].
    """
    x = (ids * ID_STEP + low.long()) & _MASK32
    x = ((x ^ (x >> 16)) * FIRST_FACTOR) & _MASK32
    x = ((x ^ (x >> 15) ^ high.long()) * SECOND_FACTOR) & _MASK32
    x = x ^ (x >> 16)
    v = ((x.float() + 0.5) * 2.0**-32).clamp_max(LARGEST_FRACTION)
    return -log(-log1p(-v))
