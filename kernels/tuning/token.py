"""Launches from projection to attention that were timed: `token_sm_<compute capability>.json`, rows with provenance.

A row is for one shape of heads and for steps of at most so many rows and keys; without a launch it says that two
launches were faster. Knows nothing of how it was timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.token_plan import MOST_ROWS, TokenChoice, TokenLaunch, TokenStep, launch_mistakes
from kernels.tuning.timed_rows import form_mistakes, timed_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.arch import GPUArch

_TIMED_DTYPES = ("bfloat16", "float16")
_FIELDS = {"heads", "max_rows", "max_keys", "launch", "provenance"}


def tuned_token(step: TokenStep, arch: GPUArch) -> TokenChoice | None:
    """Look up what was timed for a step: the row for the fewest rows, then keys, that are enough.

    The 16-bit types share a row, since their bytes and instructions are alike; float32 has none.
    """
    if step.problem.dtype not in _TIMED_DTYPES:
        return None
    return find(step, token_table(arch.sm))


def find(step: TokenStep, rows: Sequence[dict[str, Any]]) -> TokenChoice | None:
    """Find a step's row among those of a table; None without one."""
    problem = step.problem
    heads = [problem.num_heads, problem.num_kv_heads, problem.head_dim]
    fitting = [
        row
        for row in rows
        if row["heads"] == heads
        and step.rows <= row["max_rows"]
        and step.max_keys <= row["max_keys"]
    ]
    if not fitting:
        return None
    row = min(fitting, key=lambda row: (row["max_rows"], row["max_keys"]))
    launch = None if row["launch"] is None else TokenLaunch(**row["launch"])
    return TokenChoice(launch, row["provenance"], measured=True)


def token_table(sm: int) -> tuple[dict[str, Any], ...]:
    """Read the rows for a compute capability; none where there is no table."""
    return timed_rows("token", sm)


def token_mistakes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """List what is wrong with a table; empty where nothing is."""
    found = []
    seen = set()
    for number, row in enumerate(rows):
        found += [f"row {number}: {text}" for text in form_mistakes(row, _FIELDS)]
        if set(row) != _FIELDS:
            continue
        if not 0 < row["max_rows"] <= MOST_ROWS:
            found.append(f"row {number}: max_rows is {row['max_rows']}; it is 1 to {MOST_ROWS}")
        if row["launch"] is not None:
            wrong = launch_mistakes(TokenLaunch(**row["launch"]))
            found += [f"row {number}: {text}" for text in wrong]
        case = (*row["heads"], row["max_rows"], row["max_keys"])
        if case in seen:
            found.append(f"row {number}: a second row for {case}")
        seen.add(case)
    return found
