"""Tile sizes of `kernels.linear.gpu.matrix`, and the numbers of rows for which that kernel is faster than others.

    outputs, rows    per program
    columns          multiplied, and copied, at once
    splits           of the inner dimension; each split has a program of its own, which writes partial sums

With smaller tiles more programs run at once, but they read the same rows and weights more often from the second-level
cache. `estimate` weighs these reads, the products and the fixed time of a program. This module does not import Triton.
"""

from __future__ import annotations

from typing import Final, NamedTuple

FEWEST_ROWS: Final = 5
FEWEST_GROUPS_ROWS: Final = 9
"""As `FEWEST_ROWS`, of weights with scales of groups: measured with 4 bits."""
FEWEST_FP8_ROWS: Final = 3
"""As `FEWEST_ROWS`, of weights in FP8: other kernels take more time for arithmetic than for reads. On an H100, layer by
layer, 4 sequences with those and 8 with this one, which takes as long for up to 16, take 1.08 and 0.95 ms (Qwen3-0.6B),
1.32 and 0.92 (Llama-3.2-1B), 4.31 and 3.91 (Llama-3.1-8B); 2 sequences about as long with either."""
GROUP_COLUMNS: Final = 128
"""Of which groups of FP8 are multiples, so that a chunk lies within one."""
MOST_GROUPS_TILE: Final = 64
"""Rows of a program with FP8 in groups, at most: it has two sums of each result in registers."""
ROW_COUNTS: Final = (16, 32, 64, 128, 256)
"""Numbers of rows that the kernel is compiled for; a step takes the smallest that is enough, and has at most 256."""
MANY_ROWS: Final = 1024
"""Number of rows that the tiles for more rows, of batch-invariant layers alone, are chosen for."""
_MANY_WEIGHTS: Final = 32 << 20
_FEW_ROWS: Final = 128
_FEW_FP8_ROWS: Final = 64
_OUTPUTS: Final = (64, 128)
_SPLITS: Final = (1, 2, 4, 8)
_INVARIANT_ROWS: Final = 64
"""Number of rows whose best number of splits all numbers of rows of a batch-invariant layer have."""
_SHARED_BYTES: Final = 192 << 10
"""Shared memory for weights and rows; the rest is left for a block of the kernel that is ending."""
_NUM_SM: Final = 132
_BYTES_PER_US: Final = 80e3
_FLOPS_PER_US: Final = 4.5e6
"""Bytes that an SM reads from the second-level cache, and operations that it computes."""
_CONVERTS_PER_US: Final = 70e3
"""Weights in FP8 or of 4 bits that an SM converts."""
_PROGRAM_US: Final = 1.0
"""Time of a program before its first product and after its last."""


def most_rows(num_weights: int, *, bits: int = 16, in_groups: bool = False) -> int:
    """Return the number of rows up to which this kernel is used in a decoder layer.

    Measured on an H100: a layer of Qwen3-0.6B gains at 256 rows, with weights in FP8 too; those of Llama-3.2-1B and
    3.1-8B up to 128; the latter with weights in FP8 up to 64, since the library's product multiplies in FP8. Weights
    with scales of groups would have to be dequantized for the library.

    Args:
        num_weights: of the layer.
        bits: of a weight, 16, 8 in FP8 or 4.
        in_groups: whether the scales are of groups or blocks, as those of 4 bits are.
    """
    if num_weights <= _MANY_WEIGHTS or in_groups:
        return ROW_COUNTS[-1]
    return _FEW_FP8_ROWS if bits == 8 else _FEW_ROWS


class MatrixLaunch(NamedTuple):
    """The tile sizes of a layer, see the module, and the bits of a weight: 16, 8 in FP8, or 4."""

    outputs: int
    rows: int
    columns: int
    splits: int = 1
    bits: int = 16

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the weights and the rows that are multiplied at once."""
        return (self.bits * self.outputs // 8 + 2 * self.rows) * self.columns

    def stages(self, inputs: int) -> int:
        """Return how many chunks of weights, and as many of rows, shared memory holds."""
        chunks = inputs // self.splits // self.columns
        return min(chunks, _SHARED_BYTES // self.chunk_bytes)


def plan_matrix(
    outputs: int,
    inputs: int,
    rows: int,
    *,
    may_split: bool,
    splits: tuple[int, ...] = _SPLITS,
    bits: int = 16,
    most_tile: int = ROW_COUNTS[-1],
) -> MatrixLaunch:
    """Return the tile sizes with the smallest `estimate`.

    Args:
        outputs: rows of the weights.
        inputs: columns of the weights.
        rows: of x, one of `ROW_COUNTS`, or `MANY_ROWS`.
        may_split: whether the result may be partial sums.
        splits: numbers of splits to choose from, if it may.
        bits: of a weight, 16, 8 in FP8 or 4.
        most_tile: the most rows of a program.
    """
    candidates = [
        MatrixLaunch(tile, row_tile, 128 if row_tile <= 64 and part % 128 == 0 else 64, count, bits)
        for tile in _OUTPUTS
        if outputs % tile == 0
        for row_tile in ROW_COUNTS
        if row_tile <= most_tile and (row_tile == rows or 64 <= row_tile < rows)
        for count in (splits if may_split else (1,))
        if inputs % (count * 64) == 0
        for part in (inputs // count,)
    ]
    return min(candidates, key=lambda it: estimate(it, outputs, inputs, rows))


def plan_invariant_matrix(outputs: int, inputs: int, *, may_split: bool) -> dict[int, MatrixLaunch]:
    """Return tile sizes for each of `ROW_COUNTS` and for `MANY_ROWS`, with one number of splits for all of them.

    The sums of an output are added in the order of the columns within a split, then in that of the splits, so that
    number alone decides about its bits.

    Args:
        outputs: as for `plan_matrix`, as are the other arguments.
        inputs: see above.
        may_split: see above.
    """
    splits = plan_matrix(outputs, inputs, _INVARIANT_ROWS, may_split=may_split).splits
    return {
        rows: plan_matrix(outputs, inputs, rows, may_split=may_split, splits=(splits,))
        for rows in (*ROW_COUNTS, MANY_ROWS)
    }


def estimate(launch: MatrixLaunch, outputs: int, inputs: int, rows: int) -> float:
    """Estimate the microseconds of a layer, without the time that is the same for all tile sizes."""
    columns = inputs // launch.splits
    missing = 2 * max(0, launch.rows - rows) * launch.columns
    loads = columns // launch.columns * (launch.chunk_bytes - missing) / _BYTES_PER_US
    computes = 2 * launch.outputs * launch.rows * columns / _FLOPS_PER_US
    converts = launch.outputs * columns / _CONVERTS_PER_US
    if launch.bits == 8:
        computes = max(computes, converts)
    elif launch.bits == 4:
        computes += converts
    parts = 0.0
    if launch.splits > 1:
        parts = 8 * launch.splits * rows * outputs / (_NUM_SM * _BYTES_PER_US)
    programs = -(-rows // launch.rows) * (outputs // launch.outputs) * launch.splits
    return -(-programs // _NUM_SM) * (max(loads, computes) + _PROGRAM_US) + parts
