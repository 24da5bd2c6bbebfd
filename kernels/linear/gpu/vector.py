"""A linear layer of at most 4 rows at memory bandwidth, without tensor cores.

A program computes a few outputs over the whole inner dimension, so nothing is split and the order of
each sum is fixed. Before it waits for the kernel whose output it multiplies, it starts to load its first
chunks of weights to registers and to prefetch the others to the second-level cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch
from kernels.gpu.functions import (
    LINE_BYTES,
    LOWEST_KEY,
    exponentials,
    prefetch,
    ranked_bits,
    ranking_keys,
    silu,
)
from kernels.linear.checks import check_linear, check_weights

if TYPE_CHECKING:
    from kernels.linear.problem import LinearProblem
    from kernels.linear.select import LinearChoice
    from kernels.linear.weights import LinearArguments, LinearWeights

_VECTOR = tl.constexpr(8)
"""Elements that a thread loads at once, 16 bytes; it adds their products before threads exchange sums."""


@triton.jit(do_not_specialize=["num_rows"])
def vector_linear(
    x, weight, scales, bias, gain, residual, out, best, totals, num_rows, x_stride, residual_stride,
    out_stride, eps,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ARGMAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of all rows; program (outputs). Shapes as in `VectorLinear`.

    Args:
        scales: float32, one for each row of weights; where SCALED.
        best: [rows, programs] int64, the largest key of each program's outputs; where ARGMAX.
        totals: [rows, programs] float32, the sum of exp(output - largest) of each program's outputs; where ARGMAX.
        ROWS: a power of two, at least `num_rows`.
        AHEAD: chunks of BLOCK_K columns that are loaded to registers before the wait.
    """
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    FIRST: tl.constexpr = AHEAD if AHEAD < CHUNKS else CHUNKS
    PARTS: tl.constexpr = BLOCK_K // _VECTOR
    first = tl.program_id(0) * BLOCK_N
    base = weight + first.to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
    tiles = load_first(base, first, FIRST, N, K, BLOCK_N, BLOCK_K, PDL)
    ups = tiles
    if GATED:
        ups = load_first(base + N * K, first, FIRST, N, K, BLOCK_N, BLOCK_K, PDL)
    output = first + tl.arange(0, BLOCK_N)
    exists = output < N
    factors = exists
    up_factors = exists
    if SCALED:
        factors = tl.load(scales + output, mask=exists, other=0.0)
        if GATED:
            up_factors = tl.load(scales + N + output, mask=exists, other=0.0)
    biases = exists
    up_biases = exists
    if BIAS:
        biases = tl.load(bias + output, mask=exists, other=0.0)
        if GATED:
            up_biases = tl.load(bias + N + output, mask=exists, other=0.0)
    if PDL:
        gdc_wait()

    # Loaded here, the residual arrives before the sums are done; with more rows, weights need these registers.
    before = ()
    if RESIDUAL and ROWS <= 2:
        before = load_outputs(residual, residual_stride, output, exists, num_rows, ROWS)
    sums = zeros(ROWS, BLOCK_N, PARTS)
    up_sums = sums
    squares = zeros(ROWS, 1, PARTS)
    for i in tl.static_range(CHUNKS):
        if i + FIRST < CHUNKS:
            tiles = tiles + (load_chunk(base, first, i + FIRST, N, K, BLOCK_N, BLOCK_K),)
            if GATED:
                ups = ups + (load_chunk(base + N * K, first, i + FIRST, N, K, BLOCK_N, BLOCK_K),)
        rows = load_rows(x, num_rows, x_stride, i, K, ROWS, BLOCK_K)
        if NORM:
            squares = add_products(squares, rows, rows, ROWS, 1, PARTS)
            rows = scale(rows, load_row(gain, i, K, BLOCK_K), ROWS)
        sums = add_products(sums, repeat(tiles[i], ROWS), rows, ROWS, BLOCK_N, PARTS)
        if GATED:
            up_sums = add_products(up_sums, repeat(ups[i], ROWS), rows, ROWS, BLOCK_N, PARTS)

    if RESIDUAL and ROWS > 2:
        before = load_outputs(residual, residual_stride, output, exists, num_rows, ROWS)
    for r in tl.static_range(ROWS):
        result, up = add_up(sums[r], up_sums[r], squares[r], eps, K, BLOCK_N, PARTS, GATED, NORM)
        if SCALED:
            result *= factors
        if BIAS:
            result += biases.to(tl.float32)
        if GATED:
            if SCALED:
                up *= up_factors
            if BIAS:
                up += up_biases.to(tl.float32)
            result = silu(result) * up
        real = exists & (r < num_rows)
        if RESIDUAL:
            result += before[r].to(tl.float32)
        rounded = result.to(out.dtype.element_ty)
        tl.store(out + r * out_stride + output, rounded, mask=real)
        if ARGMAX:
            keys = tl.where(exists, ranking_keys(rounded.to(tl.float32), output), LOWEST_KEY)
            place = r * tl.num_programs(0) + tl.program_id(0)
            key = tl.max(keys, 0)
            tl.store(best + place, key, mask=r < num_rows)
            total = tl.sum(exponentials(ranked_bits(keys), ranked_bits(key)), 0)
            tl.store(totals + place, total, mask=r < num_rows)


@triton.jit
def load_outputs(base, stride, output, exists, num_rows, ROWS: tl.constexpr):
    """Load the columns `output` of all rows, [BLOCK_N] each; 0 where they do not exist."""
    rows = ()
    for r in tl.static_range(ROWS):
        row = tl.load(base + r * stride + output, mask=exists & (r < num_rows), other=0.0)
        rows = rows + (row,)  # type: ignore[assignment]
    return rows


@triton.jit
def load_first(
    base, first,
    COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FETCH: tl.constexpr,
):  # fmt: skip
    """Load and return COUNT chunks of weights; if FETCH, prefetch the columns after them to the second-level cache."""
    tiles = ()
    for i in tl.static_range(COUNT):
        tiles = tiles + (load_chunk(base, first, i, N, K, BLOCK_N, BLOCK_K),)  # type: ignore[assignment]
    if FETCH and COUNT * BLOCK_K < K:
        fetch_columns(base, first, COUNT * BLOCK_K, N, K, BLOCK_N)
    return tiles


@triton.jit
def zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return COUNT tensors [ROWS, COLUMNS] of float32 zeros."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([ROWS, COLUMNS], tl.float32),)  # type: ignore[assignment]
    return tiles


@triton.jit
def repeat(tile, COUNT: tl.constexpr):
    """Return a tile in float32, COUNT times."""
    tiles = ()
    wide = widen(tile)
    for _ in tl.static_range(COUNT):
        tiles = tiles + (wide,)  # type: ignore[assignment]
    return tiles


@triton.jit
def widen(tile):
    """Convert weights to float32; uint8 holds float8_e4m3fn without NaN, on GPUs that cannot convert it."""
    if tile.dtype == tl.uint8:
        # Read as float16, the exponent and fraction give a value too small by 2^8, the difference of the biases.
        bits = tile.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tile.to(tl.float32)


@triton.jit
def load_rows(
    x, num_rows, stride, number, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Load the same columns of all rows, [1, COLUMNS] float32 each; the last row replaces missing ones."""
    rows = ()
    for r in tl.static_range(ROWS):
        row = load_row(x + tl.minimum(r, num_rows - 1) * stride, number, K, COLUMNS)
        rows = rows + (row,)  # type: ignore[assignment]
    return rows


@triton.jit
def scale(rows, factor, ROWS: tl.constexpr):
    """Multiply each row by a factor."""
    scaled = ()
    for r in tl.static_range(ROWS):
        scaled = scaled + (rows[r] * factor,)  # type: ignore[assignment]
    return scaled


@triton.jit
def add_products(sums, tiles, rows, COUNT: tl.constexpr, HEIGHT: tl.constexpr, PARTS: tl.constexpr):
    """Add the products of a tile with a row, COUNT times; each thread sums its own products.

    [HEIGHT, PARTS * 8] becomes [HEIGHT, PARTS]; threads exchange nothing.
    """
    added = ()
    for r in tl.static_range(COUNT):
        products = tl.reshape(tiles[r] * rows[r], [HEIGHT, PARTS, _VECTOR])
        added = added + (sums[r] + tl.sum(products, 2),)  # type: ignore[assignment]
    return added


@triton.jit
def add_up(
    sums, up_sums, squares, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Reduce the threads' sums of one row in one exchange, and divide by the root mean square."""
    if NORM:
        square = tl.broadcast_to(squares, [BLOCK_N, PARTS])
        if GATED:
            result, up, square = tl.reduce((sums, up_sums, square), 1, _add_three)
        else:
            result, square = tl.reduce((sums, square), 1, _add_two)
            up = result
        inverse = 1.0 / tl.sqrt(square / K + eps)
        result = result * inverse
        up = up * inverse
    elif GATED:
        result, up = tl.reduce((sums, up_sums), 1, _add_two)
    else:
        result = tl.sum(sums, 1)
        up = result
    return result, up


@triton.jit
def _add_two(a, b, c, d):
    """Add pairs, so that one exchange between threads reduces two sums."""
    return a + c, b + d


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def load_chunk(
    base, first, number, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Load COLUMNS columns from `number` * COLUMNS on of ROWS rows of weights; 0 where they do not exist.

    They are evicted from the caches first, since the step reads the rest of the model before it reads them again.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = number * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    # A thread loads no more at once, so that it holds the same columns of 1-byte weights and of the rows.
    place = tl.max_contiguous(base + row * K + column, [1, _VECTOR])
    EVEN_ROWS: tl.constexpr = N % ROWS == 0
    if (number + 1) * COLUMNS <= K:
        if EVEN_ROWS:
            return tl.load(place, eviction_policy="evict_first")
        exists = (first + row < N) & (column >= 0)
        return tl.load(place, mask=exists, other=0.0, eviction_policy="evict_first")
    exists = (first + row < N) & (column < K)
    return tl.load(place, mask=exists, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_row(row, number, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the same columns of a vector, [1, COLUMNS] float32."""
    column = number * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if (number + 1) * COLUMNS <= K:
        return tl.load(row + column).to(tl.float32)
    return tl.load(row + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def fetch_columns(base, first, column, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """Prefetch ROWS rows of weights to the second-level cache, from a column on."""
    LINE: tl.constexpr = LINE_BYTES // (base.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = triton.next_power_of_2((K - column + LINE - 1) // LINE)
    row = tl.minimum(tl.arange(0, ROWS), N - 1 - first)[:, None]
    place = tl.minimum(column + tl.arange(0, LINES) * LINE, K - 1)[None, :]
    prefetch(base + row * K + place)


class VectorLinear:
    """A linear layer of up to four rows bound to its weights, which it reads in place at each call."""

    def __init__(self, weights: LinearWeights, problem: LinearProblem) -> None:
        check_weights(weights, problem)
        weight, self._bias = weights
        self._numbers, self._scale = weight.numbers, weight.scale

    def __call__(
        self, x: Tensor, choice: LinearChoice, out: Tensor | None, arguments: LinearArguments
    ) -> Tensor:
        """Compute norm(x) W^T * scale + bias, gated or added to the residual stream.

        Args:
            x: [rows, C], contiguous in C.
            choice: from `kernels.linear.select.select_linear` for these shapes.
            out: [rows, N] contiguous; None allocates it.
            arguments: the operations that the call absorbs.

        Returns:
            `out`.

        Raises:
            ShapeError: a shape differs from the choice's problem.
        """
        launch, problem = choice.launch, choice.problem
        numbers, bias, scale = self._numbers, self._bias, self._scale
        norm, residual, best, pdl = arguments
        assert launch is not None, "a vector kernel has a launch"
        check_linear(x, choice, out, arguments)
        if out is None:
            out = torch.empty((problem.rows, problem.outputs), dtype=x.dtype, device=x.device)
        vector_linear[(choice.tiles,)](
            x, numbers.view(torch.uint8) if choice.unpacks else numbers, scale, bias,
            norm.weight if norm else None, residual, out, None if best is None else best.keys,
            None if best is None else best.totals, problem.rows, x.stride(0),
            0 if residual is None else residual.stride(0), out.stride(0), norm.eps if norm else 0.0,
            N=problem.outputs, K=problem.inputs, ROWS=choice.padded_rows, BLOCK_N=launch.block_n,
            BLOCK_K=launch.block_k, AHEAD=launch.ahead, GATED=problem.gated, NORM=norm is not None,
            SCALED=scale is not None, BIAS=bias is not None, RESIDUAL=residual is not None,
            ARGMAX=best is not None, num_warps=launch.num_warps, **dependent_launch(pdl),
        )  # fmt: skip
        return out
