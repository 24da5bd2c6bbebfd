"""A linear layer whose result for a row has the same bits among any other rows, in Triton.

Every number of rows is computed with the same tiles, so the order of each sum depends on the layer alone. The inner
dimension of a layer with few outputs is split, so that a step of few rows fills the GPU; how often depends on the layer
alone, too, and the norm that follows adds the partial sums in a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch
from kernels.linear.checks import check_linear, check_weights
from kernels.linear.gpu.dequantize import dequantize
from kernels.linear.gpu.vector import widen
from kernels.weight_format import FP8_ROWS

if TYPE_CHECKING:
    from kernels.linear.problem import LinearProblem
    from kernels.linear.select import LinearChoice
    from kernels.linear.weights import LinearArguments, LinearWeights

_WIDE: Final = {"ROWS": 64, "OUTPUTS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}
_FLOAT32: Final = {"ROWS": 16, "OUTPUTS": 32, "COLUMNS": 32, "num_warps": 4, "num_stages": 2}
"""Tiles for float32, which is multiplied without tensor cores."""
_PROGRAMS: Final = 64
"""The inner dimension is split if there are fewer tiles of outputs, at most into `_MOST_SPLITS` parts."""
_MOST_SPLITS: Final = 4
_FEWEST_COLUMNS: Final = 256
"""Columns of the smallest part."""


@triton.jit(do_not_specialize=["num_rows"])
def invariant_linear(
    x, weight, scales, bias, out, num_rows, x_stride,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, IN_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of some rows over one part of the columns; program (rows, outputs, part).

    Args:
        x: [num_rows, K].
        weight: [N, K]; uint8 holds float8_e4m3fn, on GPUs that cannot convert it.
        scales: [N] float32, one for each row of weights; where SCALED.
        bias: [N]; where BIAS. The first part includes it.
        out: [num_rows, N]; [SPLITS, num_rows, N] float32 where IN_PARTS.
    """
    CHUNKS: tl.constexpr = (K + COLUMNS * SPLITS - 1) // (COLUMNS * SPLITS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = row < num_rows
    is_output = output < N
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    w_row = weight + output.to(tl.int64)[:, None] * K
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for i in range(CHUNKS):
        column = (part * CHUNKS + i) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        exists = column < K
        left = tl.load(x_row + column, mask=is_row[:, None] & exists, other=0.0)
        right = tl.load(w_row + column, mask=is_output[:, None] & exists, other=0.0)
        if SCALED:
            right = widen(right).to(left.dtype)
        acc = tl.dot(left, right.T, acc, input_precision="ieee")
    if SCALED:
        acc *= tl.load(scales + output, mask=is_output, other=0.0)[None, :]
    if BIAS:
        first = tl.load(bias + output, mask=is_output & (part == 0), other=0.0)
        acc += first.to(tl.float32)[None, :]
    line = row.to(tl.int64)
    if IN_PARTS:
        line += part.to(tl.int64) * num_rows
    place = out + line[:, None] * N + output[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def num_splits(outputs: int, inputs: int, tile: int) -> int:
    """Return the number of parts of the inner dimension of a layer for the residual stream."""
    splits = 1
    while (
        splits < _MOST_SPLITS
        and -(-outputs // tile) * splits < _PROGRAMS
        and inputs >= 2 * splits * _FEWEST_COLUMNS
    ):
        splits *= 2
    return splits


class InvariantLinear:
    """A linear layer of any number of rows bound to its weights.

    At each call it reads them in place, or converts those that are neither in the inputs' dtype nor in FP8 rows.
    """

    def __init__(self, weights: LinearWeights, problem: LinearProblem) -> None:
        check_weights(weights, problem)
        self._weight, self._bias = weights
        self._in_parts = problem.residual
        is_read = problem.format == FP8_ROWS or not problem.format.is_quantized
        self._numbers = self._weight.numbers if is_read else None
        self._scale = self._weight.scale if is_read else None
        self._tiles = _FLOAT32 if problem.dtype == "float32" else _WIDE
        stacked, inputs = self._weight.shape
        self._splits = (
            num_splits(stacked, inputs, self._tiles["OUTPUTS"]) if problem.residual else 1
        )

    def __call__(
        self, x: Tensor, choice: LinearChoice, out: Tensor | None, arguments: LinearArguments
    ) -> Tensor:
        """Compute x W^T * scale + bias.

        Args:
            x: [rows, C], contiguous in C.
            choice: from `kernels.linear.select.select_linear` for these shapes.
            out: [rows, N] contiguous; None allocates it. None for the residual stream.
            arguments: only `pdl` may be set; the kernel absorbs nothing.

        Returns:
            `out`; for the residual stream [splits, rows, N] float32 partial sums.

        Raises:
            ShapeError: a shape differs from the choice's problem.
        """
        assert all(it is None for it in arguments[:3]), "it absorbs nothing"
        assert out is None or not self._in_parts
        check_linear(x, choice, out, arguments)
        bias, scale, numbers = self._bias, self._scale, self._numbers
        if numbers is None:
            numbers = dequantize(self._weight, x.dtype, unpacks=choice.unpacks)
        rows, stacked = len(x), len(numbers)
        if self._in_parts:
            shape, dtype = (self._splits, rows, stacked), torch.float32
            out = torch.empty(shape, dtype=dtype, device=x.device)
        elif out is None:
            out = torch.empty((rows, stacked), dtype=x.dtype, device=x.device)
        tiles = self._tiles
        grid = (-(-rows // tiles["ROWS"]), -(-stacked // tiles["OUTPUTS"]), self._splits)
        invariant_linear[grid](
            x, numbers.view(torch.uint8) if choice.unpacks else numbers, scale, bias, out, rows, x.stride(0),
            N=stacked, K=numbers.shape[1], SPLITS=self._splits, SCALED=scale is not None,
            BIAS=bias is not None, IN_PARTS=self._in_parts, **tiles, **dependent_launch(arguments.pdl),
        )  # fmt: skip
        return out
