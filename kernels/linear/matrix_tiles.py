"""How a linear layer of a few rows is cut for Hopper's tensor cores, and for how many rows that pays.

    outputs, rows    of a program
    columns          that it multiplies at once, and has copied at once
    splits           of the inner dimension, each a program of its own that leaves parts of sums

The fewer outputs and rows a program has, the more of them work, and the more often the same rows and weights are read
from the second-level cache: that, the products, and what each program takes anyway are weighed. Needs no Triton.
"""

from __future__ import annotations

from typing import Final, NamedTuple

FEWEST_ROWS: Final = 5
ROW_COUNTS: Final = (16, 32, 64, 128, 256)
"""A layer is cut for the smallest of these numbers of rows that are not too few; with more it cannot be computed."""
_MANY_WEIGHTS: Final = 32 << 20
_FEW_ROWS: Final = 128
_OUTPUTS: Final = (64, 128)
_SPLITS: Final = (1, 2, 4, 8)
_SHARED_BYTES: Final = 192 << 10
"""For weights and rows; what is left has room for a block of a kernel that is ending."""
_NUM_SM: Final = 132
_BYTES_PER_US: Final = 80e3
_FLOPS_PER_US: Final = 4.5e6
"""That an SM gets from the second-level cache, and computes."""
_PROGRAM_US: Final = 1.0
"""What a program takes before its first product and after its last."""


def most_rows(num_weights: int) -> int:
    """Return the rows up to which a decoder layer of so many weights is computed so.

    Measured on an H100: a layer of Qwen3-0.6B gains at 256 rows, those of Llama-3.2-1B and 3.1-8B up to 128.
    """
    return _FEW_ROWS if num_weights > _MANY_WEIGHTS else ROW_COUNTS[-1]


class MatrixLaunch(NamedTuple):
    """How a layer is cut; see above."""

    outputs: int
    rows: int
    columns: int
    splits: int = 1

    def stages(self, inputs: int) -> int:
        """Return how many chunks of weights, and of rows, there is room for in shared memory."""
        chunks = inputs // self.splits // self.columns
        chunk_bytes = 2 * (self.outputs + self.rows) * self.columns
        return min(chunks, _SHARED_BYTES // chunk_bytes)


def plan_matrix(outputs: int, inputs: int, rows: int, *, may_split: bool) -> MatrixLaunch:
    """Return how to cut a layer.

    Args:
        outputs: rows of the weights.
        inputs: columns.
        rows: of x, one of `ROW_COUNTS`.
        may_split: whether the result may be parts of sums.
    """
    candidates = [
        MatrixLaunch(tile, row_tile, 128 if row_tile <= 64 and part % 128 == 0 else 64, splits)
        for tile in _OUTPUTS
        if outputs % tile == 0
        for row_tile in ROW_COUNTS
        if row_tile == rows or 64 <= row_tile < rows
        for splits in (_SPLITS if may_split else (1,))
        if inputs % (splits * 64) == 0
        for part in (inputs // splits,)
    ]
    return min(candidates, key=lambda it: estimate(it, outputs, inputs, rows))


def estimate(launch: MatrixLaunch, outputs: int, inputs: int, rows: int) -> float:
    """Return the microseconds that a layer will about take, beside what all ways to cut it take."""
    columns = inputs // launch.splits
    loads = 2 * (launch.outputs + min(launch.rows, rows)) * columns / _BYTES_PER_US
    computes = 2 * launch.outputs * launch.rows * columns / _FLOPS_PER_US
    parts = 0.0
    if launch.splits > 1:
        parts = 8 * launch.splits * rows * outputs / (_NUM_SM * _BYTES_PER_US)
    programs = -(-rows // launch.rows) * (outputs // launch.outputs) * launch.splits
    return -(-programs // _NUM_SM) * (max(loads, computes) + _PROGRAM_US) + parts
