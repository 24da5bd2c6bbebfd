"""Tile sizes of `kernels.linear.gpu.persistent`.

    rows, outputs    per tile; outputs are rows of the weights
    splits           of the inner dimension, which a tile adds in their order

`estimate` weighs loads from the second-level cache, products, and the last tiles, which leave SMs idle. This module
does not import Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kernels.linear.matrix_tiles import plan_invariant_matrix

if TYPE_CHECKING:
    from kernels.linear.problem import LinearProblem

COLUMNS: Final = 64
"""Columns that are copied and multiplied at once: 128 bytes, the widest swizzled row."""
CONSUMERS: Final = 2
STORED_OUTPUTS: Final = 128
"""Most outputs of a row that a consumer stores at once; with more, shared memory would hold one stage less."""
ROW_COUNTS: Final = (128, 256, 512, 1024, 2048, 4096)
"""Numbers of rows that tile sizes are chosen for; more rows have those of the last."""
INVARIANT_FEWEST_ROWS: Final = 257
"""Number of rows from which on a batch-invariant layer has this kernel. The bits of fewer rows, by another kernel, are
the same, so any number would do."""
_TILES: Final = ((128, 256), (128, 128), (128, 64))
_SPLIT_TILES: Final = ((128, 128), (128, 64))
"""Tiles whose sum and total fit the registers of two consumers."""
_SKEW: Final = 2
_RING_BYTES: Final = 192 << 10
_SHARED_BYTES: Final = 226 << 10
"""Shared memory of a program, without mbarriers, and of its ring."""
_GROUP_ROWS: Final = 2048
"""Rows of x that are multiplied by some weights before the next weights. 132 tiles then have about as many different
rows as weights, which are the fewest different bytes."""
_NUM_SMS: Final = 132
_BYTES_PER_US: Final = 60e3
_FLOPS_PER_US: Final = 4.8e6
"""Bytes that an SM reads from the second-level cache, and operations that it computes."""
_TILE_US: Final = 0.6
"""Time of a tile in which the tensor cores are idle: part of its stores, the wait for its first chunk."""


class PersistentLaunch(NamedTuple):
    """The tile sizes of a layer; see the module.

    Attributes:
        stages: chunks of columns in shared memory; `sized` replaces 0 by as many as fit.
        group: tiles of rows that are computed for some weights before the next weights; likewise.
        skew: chunks by which the second consumer is behind the first; 0 with several splits.
    """

    rows: int
    outputs: int
    splits: int = 1
    stages: int = 0
    group: int = 0
    skew: int = _SKEW


def rounded_rows(rows: int) -> int:
    """Return the number in `ROW_COUNTS` whose tile sizes a number of rows has."""
    return next((it for it in ROW_COUNTS if rows <= it), ROW_COUNTS[-1])


def plan_persistent(problem: LinearProblem, rows: int) -> PersistentLaunch:
    """Return the tile sizes with the smallest `estimate`.

    A batch-invariant layer has the number of splits of `plan_invariant_matrix`. A tile adds them: with many rows,
    partial sums would take more time than the products.

    Args:
        problem: the layer.
        rows: of x, one of `ROW_COUNTS`.
    """
    splits = 1
    if problem.batch_invariant:
        stacked = problem.matrices * problem.outputs
        planned = plan_invariant_matrix(stacked, problem.inputs, may_split=problem.residual)
        splits = next(iter(planned.values())).splits
    tiles = _TILES if splits == 1 else _SPLIT_TILES
    candidates = [sized(PersistentLaunch(*tile, splits), problem) for tile in tiles]
    return min(candidates, key=lambda it: estimate(it, problem, rows))


def sized(launch: PersistentLaunch, problem: LinearProblem) -> PersistentLaunch:
    """Return a launch with its stages and its group, and a skew that suits the number of chunks.

    The first consumer may be at most one tile ahead in the ring, since the phase of the mbarrier that signals the
    start of a tile to the second consumer is a single bit.
    """
    chunks = problem.inputs // launch.splits // COLUMNS
    stages = launch.stages
    if not stages:
        left = _SHARED_BYTES - shared_bytes(launch._replace(stages=0), problem)
        stages = min(left, _RING_BYTES) // _stage_bytes(launch)
    skew = min(launch.skew, chunks - 1, max(stages - 2, 0))
    if launch.splits > 1 or chunks + skew <= stages:
        skew = 0
    return launch._replace(
        stages=stages, group=launch.group or _GROUP_ROWS // launch.rows, skew=skew
    )


def _stage_bytes(launch: PersistentLaunch) -> int:
    return 2 * (launch.rows + launch.outputs) * COLUMNS


def shared_bytes(launch: PersistentLaunch, problem: LinearProblem) -> int:
    """Return the bytes of shared memory of a program, without those of mbarriers."""
    stored = min(launch.outputs // problem.matrices, STORED_OUTPUTS)
    staged = 0 if problem.residual else 2 * launch.rows * stored
    return launch.stages * _stage_bytes(launch) + staged


def fits(launch: PersistentLaunch, problem: LinearProblem) -> bool:
    """Whether a program has enough shared memory, and the layer enough columns for the splits."""
    return (
        shared_bytes(launch, problem) <= _SHARED_BYTES
        and problem.inputs % (launch.splits * COLUMNS) == 0
        and (launch.splits == 1 or problem.residual)
    )


def estimate(launch: PersistentLaunch, problem: LinearProblem, rows: int) -> float:
    """Estimate the microseconds of a layer, without the time that is the same for all tile sizes.

    Args:
        launch: the tile sizes.
        problem: the layer.
        rows: of x.
    """
    outputs, inputs = problem.matrices * problem.outputs, problem.inputs
    loads = 2 * (launch.outputs + launch.rows) * inputs / _BYTES_PER_US
    computes = 2 * launch.outputs * launch.rows * inputs / _FLOPS_PER_US
    tiles = -(-rows // launch.rows) * -(-outputs // launch.outputs)
    return -(-tiles // _NUM_SMS) * (max(loads, computes) + _TILE_US)
