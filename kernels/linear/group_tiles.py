"""The formats with scales of groups that kernels read, and the launches of `kernels.linear.gpu.groups`; no Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kernels.linear.problem import LinearProblem
    from kernels.weight_format import WeightFormat

MOST_ROWS: Final = 16
COLUMNS_UNIT: Final = 32
"""Of which numbers of columns and groups are multiples."""
BYTES: Final = 64
"""Of a row in a chunk of a warp."""
_MOST_STEPS: Final = 64
"""Chunks of a warp: they are unrolled."""
_FEW_COLUMNS: Final = 1024


class GroupLaunch(NamedTuple):
    """Sizes of a launch.

    Attributes:
        rows: of a program, 8 or 16.
        num_warps: of a program, which divide the columns.
        ahead: chunks that are loaded before the wait.
    """

    rows: int
    num_warps: int
    ahead: int


def reads(form: WeightFormat) -> bool:
    """Whether the kernels for 4-bit weights in groups, and for FP8 in groups or blocks, read a format."""
    if form.group == 0:
        return False
    columns = chunk_columns(form)
    if form.float:
        return form.scales in ("group", "block") and not form.shifts and form.group % columns == 0
    is_unit = form.group in (COLUMNS_UNIT, columns // 2) or form.group % columns == 0
    return form.bits == 4 and form.scales == "group" and is_unit


def chunk_columns(form: WeightFormat) -> int:
    """Return the columns of a chunk of a warp."""
    return BYTES * 8 // form.bits


def plan_groups(problem: LinearProblem) -> GroupLaunch:
    """Return the launch of a layer with at most `MOST_ROWS` rows; of 4 bits the fastest of several on an H200."""
    gated, columns = problem.gated, chunk_columns(problem.format)
    # More warps of 16 rows would have too few registers.
    warps = 4 if gated or problem.inputs < _FEW_COLUMNS or problem.rows > 8 else 8
    while problem.inputs > warps * columns * _MOST_STEPS:
        warps *= 2
    rows = 8 if problem.rows <= 8 else MOST_ROWS
    ahead = 2 if gated else 4
    return GroupLaunch(rows, warps, ahead)
