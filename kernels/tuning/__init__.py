"""Launch configurations per architecture: tables of data, each row with its provenance.

A table is `sm_<compute capability>.json`; its rows name kernel, dtypes, head dims and the longest
sequence they are for. Knows nothing of how a row was found.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.plan import LaunchConfig, TunedLaunch

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from kernels.plan import AttentionProblem, KernelSpec

_FOLDER = Path(__file__).parent


def tuned_launches(
    spec: KernelSpec, problem: AttentionProblem, arch: GPUArch
) -> tuple[TunedLaunch, ...]:
    """Look up a row's tile sizes for a problem, by ascending length.

    Falls back to the row's own safe default where the architecture's table has no row. A batch
    invariant problem gets the one configuration for any length.
    """
    assert spec.launch is not None
    found = [
        _launch(row)
        for row in table(arch.sm)
        if row["kernel"] == spec.name
        and problem.dtype in row["dtypes"]
        and problem.head_dim in row["head_dims"]
    ]
    found.sort(key=lambda row: (row.max_seqlen_k is None, row.max_seqlen_k or 0))
    if not found or found[-1].max_seqlen_k is not None:
        found.append(TunedLaunch(spec.launch, None, "safe default of the kernel's row", False))
    return tuple(found[-1:] if problem.batch_invariant else found)


@functools.cache
def table(sm: int) -> tuple[dict[str, Any], ...]:
    """Read the rows for a compute capability; empty where it has no table."""
    path = _FOLDER / f"sm_{sm}.json"
    return tuple(json.loads(path.read_text())["rows"]) if path.exists() else ()


def _launch(row: dict[str, Any]) -> TunedLaunch:
    return TunedLaunch(
        LaunchConfig(**row["launch"]), row["max_seqlen_k"], row["provenance"], row["measured"]
    )
