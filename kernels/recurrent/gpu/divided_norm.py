"""The RMS norm of a group of Mamba-2 that ranks divide, in Triton: a launch before and one after their exchange.

Tiles and the order of sums depend on the number of elements alone, so a token's bits do not depend on other tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from kernels.recurrent.pytorch import divided_norm as pytorch

if TYPE_CHECKING:
    from torch import Tensor

_MOST_ELEMENTS: Final = 2048
"""Of a tile: 16 a thread."""


@triton.jit
def add_squares(
    y, sums, sums_stride, INNER: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """Add the squares of a token's elements, y [T, INNER], to PARTS sums; program (token)."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(0, INNER, BLOCK):
        value = tl.load(y + token * INNER + i + element, mask=i + element < INNER, other=0.0)
        squares += value.to(tl.float32) * value.to(tl.float32)
    found = tl.sum(tl.reshape(squares, [PARTS, BLOCK // PARTS]), 1)
    tl.store(sums + token * sums_stride + tl.arange(0, PARTS), found)


@triton.jit
def normalize_part(
    y, total, weight, total_stride, eps, count,
    INNER: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Normalize a token's elements, y [T, INNER], in place by sums of `count` squares; program (token)."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK)
    squares = tl.sum(tl.load(total + token * total_stride + tl.arange(0, PARTS)))
    scale = 1.0 / tl.sqrt(squares / count + eps)
    y += token * INNER
    for i in tl.static_range(0, INNER, BLOCK):
        exists = i + element < INNER
        value = tl.load(y + i + element, mask=exists, other=0.0).to(tl.float32)
        factor = tl.load(weight + i + element, mask=exists, other=0.0).to(tl.float32)
        tl.store(y + i + element, (value * scale * factor).to(y.dtype.element_ty), mask=exists)


class DividedNorm(pytorch.DividedNorm):
    """See `kernels.recurrent.pytorch.divided_norm`; normalizes in place."""

    def add_squares(self, y: Tensor, sums: Tensor) -> None:
        """Write sums of squares; see the class."""
        if len(y):
            add_squares[(len(y),)](y, sums, sums.stride(0), **_sizes(y.shape[1]))

    def normalize(self, y: Tensor, total: Tensor) -> Tensor:
        """Normalize by sums of squares; see the class."""
        if len(y):
            normalize_part[(len(y),)](
                y, total, self.weight, total.stride(0), self.eps, self.count, **_sizes(y.shape[1])
            )
        return y


def _sizes(inner: int) -> dict[str, int]:
    block = min(_MOST_ELEMENTS, max(pytorch.PARTS, triton.next_power_of_2(inner)))
    return {"INNER": inner, "BLOCK": block, "PARTS": pytorch.PARTS, "num_warps": 4}
