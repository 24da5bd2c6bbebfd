"""Checks the contents of a table of launch configurations."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from kernels.arch import CATALOGUE
from kernels.attention.launch import LaunchConfig
from kernels.attention.problem import DTYPES, KV_DTYPES
from kernels.attention.registry import INVARIANT_REGISTRY, PREFIX_REGISTRY, REGISTRY
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import MOST_VECTOR_ROWS, VECTOR
from kernels.linear.registry import REGISTRY as LINEAR_REGISTRY
from kernels.linear.select import WARP_COLUMNS, LinearChoice
from kernels.linear.tuned import read_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernels.attention.spec import KernelSpec

_FIELDS = {"kernel", "dtypes", "head_dims", "max_seqlen_k", "launch", "provenance", "measured"}
_LINEAR_FIELDS = {"outputs", "inputs", "gated", "max_rows", "kernel", "launch", "provenance"}
_OPTIONAL = {"kv_dtypes", "min_heads_per_sm"}
_LAUNCH_FIELDS = {field.name: field for field in dataclasses.fields(LaunchConfig)}
_NEEDED = {n for n, field in _LAUNCH_FIELDS.items() if field.default is dataclasses.MISSING}
_SMALLEST_TILE = 16
"""Edge of the smallest tile that tensor cores multiply. Source: Triton's `tl.dot`."""


def mistakes(sm: int, rows: Sequence[dict[str, Any]]) -> list[str]:
    """List the mistakes in a table; empty if there are none.

    Args:
        sm: compute capability that the table is for.
        rows: as in its file.
    """
    arches = [arch for arch in CATALOGUE.values() if arch.sm == sm]
    if not arches:
        return [f"sm_{sm} is no GPU of the catalogue"]
    limit = min(arch.shared_memory_bytes for arch in arches)
    specs = {
        spec.name: spec
        for spec in (*REGISTRY, *PREFIX_REGISTRY, *INVARIANT_REGISTRY)
        if spec.launch and spec.sm and not arches[0].unsupported(spec.sm)
    }
    found: list[str] = []
    sound = []
    for number, row in enumerate(rows):
        wrong = list(_row_mistakes(row, specs, limit))
        found += [f"row {number}: {text}" for text in wrong]
        if not wrong:
            sound.append(row)
    # A broken row may be meant to fill a gap, so gaps are only searched in tables without broken rows.
    return found or [*_repeated(sound), *_missing(sound, specs)]


def shared_memory_estimate(launch: LaunchConfig, cache_dtype: str, head_dim: int) -> int:
    """Estimate the bytes of the tiles of keys and values in flight.

    The compiler needs more; the cross-compile tests check the true size.
    """
    element = 4 if cache_dtype == "float32" else 1 if cache_dtype in KV_DTYPES else 2
    return max(1, launch.num_stages - 1) * launch.block_n * head_dim * 2 * element


def _row_mistakes(row: dict[str, Any], specs: dict[str, KernelSpec], limit: int) -> Iterator[str]:
    if not _FIELDS <= set(row) <= _FIELDS | _OPTIONAL:
        yield f"has the keys {sorted(row)}; expected {sorted(_FIELDS)}, may have {sorted(_OPTIONAL)}"
        return
    if not _NEEDED <= set(row["launch"]) <= set(_LAUNCH_FIELDS):
        yield f"launch has the keys {sorted(row['launch'])}; needs {sorted(_NEEDED)} of {sorted(_LAUNCH_FIELDS)}"
        return
    spec = specs.get(row["kernel"])
    if spec is None:
        yield f"kernel {row['kernel']!r} is none of {', '.join(specs)}"
        return
    yield from _case_mistakes(row, spec, limit)
    length = row["max_seqlen_k"]
    if length is not None and not (_is_count(length) and length >= 1):
        yield f"max_seqlen_k is {length!r}; it must be null or at least 1"
    fewest = row.get("min_heads_per_sm", 1)
    if not (_is_count(fewest) and fewest >= 1):
        yield f"min_heads_per_sm is {fewest!r}; it must be at least 1"
    if not isinstance(row["measured"], bool):
        yield f"measured is {row['measured']!r}; it must be true or false"
    if not isinstance(row["provenance"], str) or not row["provenance"].strip():
        yield f"provenance is {row['provenance']!r}; it must say where the numbers come from"


def _case_mistakes(row: dict[str, Any], spec: KernelSpec, limit: int) -> Iterator[str]:
    if not row["dtypes"] or not set(row["dtypes"]) <= spec.dtypes:
        yield f"dtypes {row['dtypes']} are not among {', '.join(DTYPES)}"
    elif not row["head_dims"] or not set(row["head_dims"]) <= (spec.head_dims or set()):
        yield f"head_dims {row['head_dims']} are not among {sorted(spec.head_dims or ())}"
    elif "kv_dtypes" in row and not _reads(spec, row["kv_dtypes"], row["dtypes"]):
        yield f"kv_dtypes {row['kv_dtypes']} are not what {spec.name} reads with {row['dtypes']}"
    elif wrong := list(_launch_mistakes(row["launch"], spec.row_tiles)):
        yield from wrong
    else:
        launch = LaunchConfig(**row["launch"])
        for dtype in row.get("kv_dtypes", row["dtypes"]):
            needed = shared_memory_estimate(launch, dtype, max(row["head_dims"]))
            if needed > limit:
                yield f"needs about {needed} bytes of shared memory in {dtype}; the limit is {limit}"


def _reads(spec: KernelSpec, kv_dtypes: list[str], dtypes: list[str]) -> bool:
    known = spec.quantized
    return (
        known is not None
        and bool(kv_dtypes)
        and set(kv_dtypes) <= known.kv_dtypes
        and set(dtypes) <= known.dtypes
    )


def _launch_mistakes(
    launch: dict[str, Any], row_tiles: frozenset[int] | None = None
) -> Iterator[str]:
    for name, least, most in (
        ("block_m", _SMALLEST_TILE, 256),
        ("block_n", _SMALLEST_TILE, 256),
        ("num_warps", 1, 16),
    ):
        value = launch[name]
        if name == "block_m" and row_tiles is not None:
            if value not in row_tiles:
                yield f"block_m is {value!r}; this kernel has {sorted(row_tiles)}"
            continue
        if not _is_count(value) or not least <= value <= most or value.bit_count() != 1:
            yield f"{name} is {value!r}; it must be a power of two from {least} to {most}"
    for name, most in (("num_stages", 8), ("programs_per_sm", 32)):
        value = launch.get(name, 1)
        if not _is_count(value) or not 1 <= value <= most:
            yield f"{name} is {value!r}; it must be from 1 to {most}"
    if not isinstance(one_loop := launch.get("one_loop", False), bool):
        yield f"one_loop is {one_loop!r}; it must be true or false"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _repeated(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    seen = set()
    for row in rows:
        for key in _cases(row):
            if (case := (*key, row["max_seqlen_k"], row.get("min_heads_per_sm"))) in seen:
                yield f"{_name(*key)}: two rows with max_seqlen_k {row['max_seqlen_k']}"
            seen.add(case)


def _missing(rows: Sequence[dict[str, Any]], specs: dict[str, KernelSpec]) -> Iterator[str]:
    covered = {
        key
        for row in rows
        if row["max_seqlen_k"] is None and "min_heads_per_sm" not in row
        for key in _cases(row)
    }
    for spec in specs.values():
        if spec.tuned_as is not None:
            continue
        quantized = spec.quantized.kv_dtypes if spec.quantized and spec.quantized_only else (None,)
        for case in itertools.product(sorted(spec.dtypes), sorted(spec.head_dims or ()), quantized):
            if (spec.name, *case) not in covered:
                yield f"{_name(spec.name, *case)}: no row for any length (max_seqlen_k null)"


def _cases(row: dict[str, Any]) -> list[tuple[str, str, int, str | None]]:
    return [
        (row["kernel"], dtype, dim, kv_dtype)
        for dtype in row["dtypes"]
        for dim in row["head_dims"]
        for kv_dtype in row.get("kv_dtypes", (None,))
    ]


def _name(kernel: str, dtype: str, head_dim: int, kv_dtype: str | None = None) -> str:
    cache = "" if kv_dtype is None else f" over {kv_dtype}"
    return f"{kernel} {dtype} head_dim {head_dim}{cache}"


def linear_mistakes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """List the mistakes in a table of linear layers; empty if there are none."""
    found = []
    seen = set()
    for number, row in enumerate(rows):
        if set(row) != _LINEAR_FIELDS:
            found.append(
                f"row {number}: has the keys {sorted(row)}; expected {sorted(_LINEAR_FIELDS)}"
            )
            continue
        if not str(row["provenance"]).strip():
            found.append(f"row {number}: provenance must say where the numbers come from")
        problem = LinearProblem(row["max_rows"], row["outputs"], row["inputs"], gated=row["gated"])
        spec = next(spec for spec in LINEAR_REGISTRY if spec.name == row["kernel"])
        choice = LinearChoice(problem, spec, read_row(row).launch, row["provenance"])
        found += [f"row {number}: {text}" for text in linear_launch_mistakes(choice)]
        case = (row["outputs"], row["inputs"], row["gated"], row["max_rows"])
        if case in seen:
            found.append(f"row {number}: a second row for {problem}")
        seen.add(case)
    return found


def linear_launch_mistakes(choice: LinearChoice) -> list[str]:
    """List why a launch does not fit its kernel and problem; empty if it does."""
    launch, problem = choice.launch, choice.problem
    if choice.spec is not VECTOR:
        return [] if launch is None else ["the library takes no launch"]
    if launch is None:
        return ["has no launch"]
    found = [
        f"{name} is {value}; it must be a power of two"
        for name in ("block_n", "block_k", "num_warps")
        if (value := getattr(launch, name)) < 1 or value.bit_count() != 1
    ]
    if launch.block_k < WARP_COLUMNS * launch.num_warps:
        found.append(f"block_k is {launch.block_k}: less than {WARP_COLUMNS} for each warp")
    if problem.rows > MOST_VECTOR_ROWS:
        found.append(f"{problem.rows} rows are too many")
    if launch.ahead < 1:
        found.append(f"ahead is {launch.ahead}; it must be at least 1")
    return found
