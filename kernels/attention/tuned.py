"""Launch configurations of attention kernels per architecture: JSON tables, each row with its provenance.

A table is `sm_<compute capability>.json`. A row names its kernel, dtypes, head dims and longest sequence. It may also
name dtypes of quantized caches, and `min_heads_per_sm`: the minimum of key-value heads per SM, of all sequences
together. With that many, a decode fills the GPU without splitting its keys. `tests/kernels/tuning_check.py` lists what
a table must contain.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.attention.launch import LaunchConfig, TunedLaunch

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from kernels.attention.problem import AttentionProblem
    from kernels.attention.spec import KernelSpec

_FOLDER = Path(__file__).parents[1] / "tuning"


def tuned_launches(
    spec: KernelSpec, problem: AttentionProblem, arch: GPUArch
) -> tuple[TunedLaunch, ...]:
    """Look up the tile sizes of a registry row for a problem, in the order of `Selection.launches`.

    An architecture without a table takes the first one of `GPUArch.tuning_order`; a quantized cache without rows takes
    those of an unquantized one; a problem without rows takes the registry row's default. The provenance says so. A
    batch-invariant problem gets the single configuration for any length and number of sequences.
    """
    assert spec.launch is not None
    source = table_for(arch)
    found = []
    if source is not None:
        rows = [
            row
            for row in table(source)
            if row["kernel"] == (spec.tuned_as or spec.name)
            and problem.dtype in row["dtypes"]
            and problem.head_dim in row["head_dims"]
        ]
        own = [row for row in rows if is_for(row, problem.kv_dtype)]
        found = [_launch(row, source, problem, arch) for row in own]
        if not found:
            plain = [_launch(row, source, problem, arch) for row in rows if is_for(row, None)]
            found = [_for_another_cache(tuned, problem.kv_dtype) for tuned in plain]
    found.sort(key=lambda row: (-row.min_num_seqs, row.max_seqlen_k is None, row.max_seqlen_k or 0))
    if not found or found[-1].max_seqlen_k is not None or found[-1].min_num_seqs:
        default = f"safe default of {spec.name}: no table has this head dim and dtype"
        if source is None:
            default = f"safe default of {spec.name}: sm_{arch.sm} has no table"
        found.append(TunedLaunch(spec.launch, None, default, measured=False))
    return tuple(found[-1:] if problem.batch_invariant else found)


def is_for(row: dict[str, Any], kv_dtype: str | None) -> bool:
    """Whether a row is for caches of a dtype; None is the queries' dtype."""
    return kv_dtype in row.get("kv_dtypes", (None,))


def table_for(arch: GPUArch) -> int | None:
    """Return the compute capability whose table a processor uses; None for none."""
    return next((known for known in arch.tuning_order if known in tables()), None)


@functools.cache
def tables() -> tuple[int, ...]:
    """Return the compute capabilities that have a table."""
    return tuple(sorted(int(path.stem.removeprefix("sm_")) for path in _FOLDER.glob("sm_*.json")))


@functools.cache
def table(sm: int) -> tuple[dict[str, Any], ...]:
    """Return the rows of one of `tables()`."""
    return tuple(json.loads((_FOLDER / f"sm_{sm}.json").read_text())["rows"])


def _launch(
    row: dict[str, Any], source: int, problem: AttentionProblem, arch: GPUArch
) -> TunedLaunch:
    launch = LaunchConfig(**row["launch"])
    fewest = -(-row.get("min_heads_per_sm", 0) * arch.num_sms // problem.num_kv_heads)
    tuned = TunedLaunch(launch, row["max_seqlen_k"], row["provenance"], row["measured"], fewest)
    if source == arch.tuning_order[0]:
        return tuned
    borrowed = f"table of sm_{source}, sm_{arch.sm} has none; {tuned.provenance}"
    return dataclasses.replace(tuned, provenance=borrowed, measured=False)


def _for_another_cache(tuned: TunedLaunch, kv_dtype: str | None) -> TunedLaunch:
    provenance = (
        f"row for a cache of the queries' dtype, none is for {kv_dtype}; {tuned.provenance}"
    )
    return dataclasses.replace(tuned, provenance=provenance, measured=False)
