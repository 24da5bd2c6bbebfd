"""The product of emulators of tensor cores: the bits of a row do not depend on the other rows, as on a GPU.

A BLAS library may add the products of a row in another order at another place of the matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, added in an order that depends on K alone, since all operations are elementwise.

    Args:
        left: [..., M, K]; K is a power of two.
        right: [..., K, N], of the same dtype.
    """
    sums = left[..., None] * right[..., None, :, :]
    while (length := sums.shape[-2]) > 1:
        assert length % 2 == 0
        sums = sums[..., : length // 2, :] + sums[..., length // 2 :, :]
    return sums[..., 0, :]
