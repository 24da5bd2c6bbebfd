"""The table of the engine's speed for the shapes of small models, from the newest results of `benchmarks.shapes`."""

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
    """Return a table of the newest result of each shape on the machine of the newest, with shares of the roofline."""
    found = [
        {**json.loads(path.read_text()), "file": path.name}
        for path in _RESULTS.glob("*-shapes-*.json")
    ]
    found.sort(key=lambda it: str(it["date"]))
    newest = found[-1]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    files: dict[tuple[str, str], str] = {}
    for result in found:
        if result["machine"] == newest["machine"]:
            rows |= {(row["model"], row["workload"]): row for row in result["rows"]}
            files |= {(row["model"], row["workload"]): result["file"] for row in result["rows"]}
    lines = ["| | " + " | ".join(_COLUMNS.values()) + " |", "|---" * (len(_COLUMNS) + 1) + "|"]
    models = sorted({model for model, _ in rows}, key=lambda it: float(rows[it, "batch1"]["value"]))
    for model in models:
        cells = " | ".join(_cell(rows[model, workload]) for workload in _COLUMNS)
        lines.append(f"| {model} | {cells} |")
    older: dict[str, list[str]] = {}
    for model in models:
        for file in dict.fromkeys(files[model, it] for it in _COLUMNS):
            columns = [it for it in _COLUMNS if files[model, it] == file]
            partly = f" ({' '.join(columns)})" if len(columns) < len(_COLUMNS) else ""
            older.setdefault(file, []).append(model + partly)
    older.pop(newest["file"], None)
    others = "".join(f"; `{file}`: {', '.join(which)}" for file, which in older.items())
    lines += ["", f"{newest['machine']}; `{newest['file']}`{others}."]
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    value = row["value"]
    shown = f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.3g}"
    return f"{shown} ({row['roofline']:.0%})"
