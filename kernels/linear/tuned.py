"""Measured launches of linear layers: `linear_sm_<compute capability>.json`, each row with its provenance.

A row is for one shape of the weights and for steps of at most `max_rows` rows.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.linear.select import LinearLaunch, TunedLinear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.arch import GPUArch
    from kernels.linear.problem import LinearProblem

_FOLDER = Path(__file__).parents[1] / "tuning"
_TIMED_DTYPES = ("bfloat16", "float16")


def tuned_linear(problem: LinearProblem, arch: GPUArch) -> TunedLinear | None:
    """Look up the measured launch for a problem: the row with the smallest sufficient `max_rows`.

    bfloat16 and float16 share a row, since their sizes and instructions are alike; other weights have none.
    """
    if problem.format.name not in _TIMED_DTYPES:
        return None
    return find(problem, linear_table(arch.sm))


def find(problem: LinearProblem, rows: Sequence[dict[str, Any]]) -> TunedLinear | None:
    """Find a problem's row in a table; None if it has none."""
    fitting = [
        row
        for row in rows
        if (row["outputs"], row["inputs"], row["gated"])
        == (problem.outputs, problem.inputs, problem.gated)
        and problem.rows <= row["max_rows"]
    ]
    if not fitting:
        return None
    return read_row(min(fitting, key=lambda row: int(row["max_rows"])))


@functools.cache
def linear_table(sm: int) -> tuple[dict[str, Any], ...]:
    """Read the rows for a compute capability; empty without a table."""
    path = _FOLDER / f"linear_sm_{sm}.json"
    return tuple(json.loads(path.read_text())["rows"]) if path.exists() else ()


def read_row(row: dict[str, Any]) -> TunedLinear:
    """Return a row of a table."""
    launch = None if row["launch"] is None else LinearLaunch(**row["launch"])
    return TunedLinear(row["kernel"], launch, row["provenance"])
