"""Sizes of the single-launch step that follow from a model's shape and a GPU, without Triton.

Dimensions: C hidden size, H query heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from kernels.step.weights import StepShape
    from kernels.weight_format import WeightFormat

ROWS: Final = 8
"""Rows of weights in a part: one for each consumer warp."""
WARPS: Final = 8
"""Consumer warps."""
COLUMNS: Final = 256
"""Columns of weights in a part: 16 bytes for each thread of a warp."""
PARTS: Final = 4
"""Parts in a stage of the ring."""
STAGE_BYTES: Final = PARTS * ROWS * COLUMNS * 2
MOST_STAGES: Final = 12
LEAST_STAGES: Final = 4
FP8_GROUP: Final = 128
"""Of which groups of FP8 weights are multiples."""
ROW_COUNTS: Final = (2, 4, 8)
"""Numbers of rows for which a step of several is compiled."""
MOST_TILES: Final = 4
"""Tiles of 8 rows of weights that a program multiplies before its warps add their sums."""
SUMS: Final = 64
"""Of a tile: 8 for each of 8 rows."""
MOST_TENSOR_TILES: Final = 6
"""As `MOST_TILES`, in a step of one sequence that is not computed as one of several rows."""
WARP_SUMS: Final = 32
"""Of a row of weights: 4 of each warp, one for each part of a stage in the model's dtype."""
MOST_SPLITS: Final = 8
"""Splits of a row, at most: to merge them, a thread holds its elements of all splits in registers."""
MOST_HEADS: Final = 4
"""Query heads that a program attends, at most: more need more registers than there are."""
MOST_HELD: Final = 2048
"""Largest hidden size of which each warp adds all squares."""
HEAD_BYTES: Final = 8192
"""Of the partial results of a query head that the threads of a program have before they merge them."""
_SCRATCH_BYTES: Final = 6 * 1024
"""For barriers, the scales of FP8 weights, and what the compiler exchanges between warps."""


class StepSizes(NamedTuple):
    """How a step is divided.

    Attributes:
        group_splits: programs that attend the same keys, each for other query heads.
        heads: query heads that such a program attends; the last one may have fewer.
        padded_heads: `heads`, rounded up to a power of two.
        padded_dim: the head dim, rounded up to a power of two.
        block_dim: largest power of two that divides the head dim.
        inputs: elements of shared memory for the largest vectors of all rows, each of whole WIDTHs of 1024, and at
            least for the partial results of the heads.
        splits: parts of the keys of a row, at most; the same for any number of rows.
        local: splits that a program attends, one after the other.
        stages: of the ring; less than `LEAST_STAGES` if the shared memory is too small.
    """

    group_splits: int
    heads: int
    padded_heads: int
    padded_dim: int
    block_dim: int
    inputs: int
    splits: int
    local: int
    stages: int


def part_columns(form: WeightFormat) -> int:
    """Return the columns of a part of quantized weights, which has COLUMNS bytes of a row."""
    return COLUMNS * 8 // form.bits


def part_scales(form: WeightFormat | None) -> int:
    """Return how many scales a row has in a part of weights with scales of groups; 0 for other weights.

    Half of the warps multiply `FP8_GROUP` columns of FP8, so there is a scale for each of these, whatever the group.
    """
    if form is None or not form.group:
        return 0
    return max(1, part_columns(form) // (FP8_GROUP if form.float else form.group))


def step_sizes(
    shape: StepShape,
    arch: GPUArch,
    rows: int = 1,
    *,
    of_rows: bool = False,
    weight_format: WeightFormat | None = None,
) -> StepSizes:
    """Divide the step of a model on a GPU.

    Query heads are divided until all SMs have some; the keys that several programs read come from the second-level
    cache.

    Args:
        shape: sizes of the model.
        arch: the GPU.
        rows: 1 or one of `ROW_COUNTS`.
        of_rows: whether one row is computed as one of several is.
        weight_format: of the layers' matrices; None for full numbers.
    """
    group = shape.num_heads // shape.num_kv_heads
    least = -(-group // MOST_HEADS)
    kv_heads = rows * shape.num_kv_heads
    group_splits = max(least, min(group, arch.num_sms // (MOST_SPLITS * kv_heads)))
    heads = -(-group // group_splits)
    # No program is without heads: it would clear places of another one's.
    group_splits = -(-group // heads)
    padded_heads = _power_of_two(heads)
    padded_dim = _power_of_two(shape.head_dim)
    queries = shape.num_heads * shape.head_dim
    largest = max(shape.hidden_size, shape.inner_size, queries)
    partials = padded_heads * HEAD_BYTES // 2
    head_bytes = max(4, _power_of_two(heads + 2 * rows)) * padded_dim * 2
    inputs = -(-largest // partials) * partials
    sum_bytes = MOST_TENSOR_TILES * ROWS * WARP_SUMS * 4
    if of_rows:
        columns = PARTS * COLUMNS
        inputs = max(-(-largest // columns) * columns * rows, partials)
        sum_bytes = MOST_TILES * ROWS * SUMS * 4
    # The heads lie in the memory of the sums if it holds them.
    used = sum_bytes + (0 if rows > 1 and head_bytes <= sum_bytes else head_bytes)
    used += inputs * 2
    stage_bytes = STAGE_BYTES + 2 * PARTS * ROWS * part_scales(weight_format) * 4
    # The splits of a row are those of a step of one row, whatever programs share them.
    splits = _rounded_down(min(MOST_SPLITS, arch.num_sms // (shape.num_kv_heads * least)))
    split_groups = _rounded_down(min(splits, arch.num_sms // (kv_heads * group_splits)))
    stages = (arch.shared_memory_bytes - _SCRATCH_BYTES - used) // stage_bytes
    return StepSizes(
        group_splits,
        heads,
        padded_heads,
        padded_dim,
        shape.head_dim & -shape.head_dim,
        inputs,
        splits,
        splits // max(split_groups, 1),
        min(stages, MOST_STAGES),
    )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _rounded_down(size: int) -> int:
    """Return the largest power of two that is at most `size`; 0 for 0."""
    return 1 << size.bit_length() >> 1
