"""Formats the measured tables of docs/kernels.md, each from the newest committed result that has rows for it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from benchmarks.attention_report import TABLES

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
_NOTHING = "Nothing has been measured on a GPU yet: `python -m benchmarks.attention`."


def attention_table(folder: Path = RESULTS) -> str:
    """Return the Markdown tables of prefill and decode compared with other libraries, and the source of each table.

    Args:
        folder: the folder of the result files.
    """
    results = [
        {**json.loads(path.read_text()), "file": path.name}
        for path in folder.glob("*-attention-*.json")
    ]
    topics = ("attention", "attention-lengths")
    results = [it for it in results if it["topic"] in topics and "ceilings" in it]
    results.sort(key=lambda result: str(result["date"]), reverse=True)
    tables = []
    for belongs, table in TABLES:
        rows = ([row for row in result["rows"] if belongs(row)] for result in results)
        found = next(((it, some) for it, some in zip(results, rows, strict=True) if some), None)
        if found is not None:
            tables.append((found[0], table(found[1])))
    lines: list[str] = []
    for result, group in itertools.groupby(tables, key=lambda pair: pair[0]):
        for _, table_lines in group:
            lines += [*table_lines, ""]
        lines += _source(result)
    return "\n".join(lines) if lines else _NOTHING


def _source(result: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    ceilings = result["ceilings"]
    return [
        f"{result['machine']}; {versions}; {result['date'][:10]}; `{result['file']}`; "
        f"`{result['command']}`. Ceilings in the same run: {ceilings['gemm_tflops']:.0f} TFLOP/s of a bf16 GEMM, "
        f"{ceilings['copy_gbs']:.0f} GB/s of a copy. Elsewhere: {result['peers_elsewhere']}.",
        "",
    ]
