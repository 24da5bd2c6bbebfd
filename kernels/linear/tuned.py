"""Measured launches of linear layers: `linear_sm_<compute capability>.json`, each row with its provenance.

A row is for one shape of the weights and for steps of at most `max_rows` rows.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.linear.problem import LinearProblem
from kernels.linear.registry import REGISTRY
from kernels.linear.select import LinearChoice, LinearLaunch, TunedLinear, launch_mistakes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.arch import GPUArch

_FOLDER = Path(__file__).parents[1] / "tuning"
_TIMED_DTYPES = ("bfloat16", "float16")
_FIELDS = {"outputs", "inputs", "gated", "max_rows", "kernel", "launch", "provenance"}


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
    return _tuned(min(fitting, key=lambda row: int(row["max_rows"])))


@functools.cache
def linear_table(sm: int) -> tuple[dict[str, Any], ...]:
    """Read the rows for a compute capability; empty without a table."""
    path = _FOLDER / f"linear_sm_{sm}.json"
    return tuple(json.loads(path.read_text())["rows"]) if path.exists() else ()


def linear_mistakes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """List the mistakes in a table; empty if there are none."""
    found = []
    seen = set()
    for number, row in enumerate(rows):
        if set(row) != _FIELDS:
            found.append(f"row {number}: has the keys {sorted(row)}; expected {sorted(_FIELDS)}")
            continue
        if not str(row["provenance"]).strip():
            found.append(f"row {number}: provenance must say where the numbers come from")
        problem = LinearProblem(row["max_rows"], row["outputs"], row["inputs"], gated=row["gated"])
        spec = next(spec for spec in REGISTRY if spec.name == row["kernel"])
        choice = LinearChoice(problem, spec, _tuned(row).launch, row["provenance"])
        found += [f"row {number}: {text}" for text in launch_mistakes(choice)]
        case = (row["outputs"], row["inputs"], row["gated"], row["max_rows"])
        if case in seen:
            found.append(f"row {number}: a second row for {problem}")
        seen.add(case)
    return found


def _tuned(row: dict[str, Any]) -> TunedLinear:
    launch = None if row["launch"] is None else LinearLaunch(**row["launch"])
    return TunedLinear(row["kernel"], launch, row["provenance"])
