"""The table of the engine's speed for the shapes of small models, from the newest result of `benchmarks.shapes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
_COLUMNS = {
    "batch1": "one sequence, ms a token",
    "decode8": "8 sequences, tokens/s",
    "decode64": "64",
    "decode256": "256",
    "ttft4096": "first token of 4096, ms",
}


def shapes_table() -> str:
    """Return the table of the newest result of `benchmarks.shapes`, with the shares of the roofline."""
    found = [json.loads(path.read_text()) for path in _RESULTS.glob("*-shapes-*.json")]
    result = max(found, key=lambda it: str(it["date"]))
    rows = {(row["model"], row["workload"]): row for row in result["rows"]}
    lines = ["| | " + " | ".join(_COLUMNS.values()) + " |", "|---" * (len(_COLUMNS) + 1) + "|"]
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        cells = " | ".join(_cell(rows[model, workload]) for workload in _COLUMNS)
        lines.append(f"| {model} | {cells} |")
    lines += ["", f"{result['machine']}, commit {result['commit']}."]
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    value = row["value"]
    shown = f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.3g}"
    return f"{shown} ({row['roofline']:.0%})"
