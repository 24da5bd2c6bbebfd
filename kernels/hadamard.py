"""The rotation of queries and keys over an FP8 cache, which leaves their scores as they are.

e4m3 rounds an element by up to a sixteenth of itself, so a score's error is dominated by the outliers of its key. The
rotation multiplies a head by an orthogonal matrix, a Hadamard matrix with random signs, that spreads an outlier over
the row; the errors of many equal parts average out. The same matrix for queries and keys cancels in their product.

A Hadamard matrix has a power of two of rows, so a head of 80 elements has five blocks: elements d with the same
d % (D / 2) // 8 are mixed, the largest power of two that divides D / 2 from each half.

Source: Shah et al., "FlashAttention-3", 2024, section 3.3 ("incoherent processing").
"""

from __future__ import annotations

import functools
import math
from typing import Final

import torch
from torch import Tensor

SIGN_FACTOR: Final = 40641
SIGN_BIT: Final = 10
"""Element d changes its sign if this bit of d * SIGN_FACTOR is set.

Found by search: of usual head dims, a head of equal elements, of alternating signs or with halves of opposite signs has
no element of more than half its length afterwards.
"""


def mixed_elements(head_dim: int) -> int:
    """Return how many elements of each half are mixed: the largest power of two that divides D / 2."""
    half = head_dim // 2
    return half & -half


@functools.lru_cache(maxsize=16)
def hadamard_matrix(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthogonal matrix, [D, D].

    Args:
        head_dim: D, even.
        dtype: of the result.
        device: of the result.
    """
    half, mixed = head_dim // 2, mixed_elements(head_dim)
    element = torch.arange(head_dim)
    block = element % half // mixed
    # The bits by which Sylvester's construction decides the sign of an element of the matrix.
    bits = element % half % mixed + element // half * mixed
    common = bits[:, None] & bits[None, :]
    odd = torch.zeros_like(common)
    for bit in range(mixed.bit_length()):
        odd ^= (common >> bit) & 1
    matrix = torch.where(odd == 1, -1.0, 1.0).double() * (block[:, None] == block[None, :])
    signs = 1 - 2 * ((element * SIGN_FACTOR >> SIGN_BIT) & 1)
    matrix = matrix * signs[:, None] / math.sqrt(2 * mixed)
    return matrix.to(device, dtype)


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply heads [..., D] by `hadamard_matrix`, in float32 at least; returns the dtype of `x`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) @ hadamard_matrix(x.shape[-1], wide, x.device)).to(x.dtype)
