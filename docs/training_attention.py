"""Formats the measured parts of docs/flash-attention.md: a table and two plots of attention for training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.svg_plot import Line, line_plot

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
HEAD_DIM = 128
_CONTENDERS = {
    "tessera": ("Tessera", "#0072b2"),
    "flash": ("FlashAttention-2", "#d55e00"),
    "cudnn": ("cuDNN", "#009e73"),
    "math": ("standard", "#666666"),
}
"""Names in the document and colors, by name in the result file."""


def newest_result(folder: Path = RESULTS) -> dict[str, Any]:
    """Return the newest result of `benchmarks.attention_training` on a GPU with causal rows of `HEAD_DIM`.

    Rows of lengths that only older results of the same machine have are added; `files` maps each result file to its
    lengths, newest first.

    Raises:
        FileNotFoundError: there is none.
    """
    paths = folder.glob("*-attention-training-*.json")
    found = [json.loads(path.read_text()) | {"file": path.name} for path in sorted(paths)]
    found = [result for result in found if not result["file"].startswith("cpu-") and _rows(result)]
    if not found:
        raise FileNotFoundError(f"{folder} has no result of benchmarks.attention_training")
    found.sort(key=lambda result: str(result["date"]), reverse=True)
    rows: list[dict[str, Any]] = []
    files: dict[str, list[int]] = {}
    for result in found:
        known = {row["length"] for row in rows}
        added = [row for row in _rows(result) if row["length"] not in known]
        if added and result["machine"] == found[0]["machine"]:
            rows += added
            files[result["file"]] = sorted({row["length"] for row in added})
    return {**found[0], "rows": rows, "files": files}


def training_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: TFLOP/s of forward and backward, and memory, by length."""
    names = [name for name, _ in _CONTENDERS.values()]
    lines = [
        f"{result['machine']}, bfloat16, causal, D = {HEAD_DIM}: TFLOP/s of forward and backward, MiB of both",
        f"({_sources(result['files'])}).",
        "",
        f"| tokens | {' | '.join(names)} | MiB: {' | '.join(names)} |",
        "|---" * (1 + 2 * len(names)) + "|",
    ]
    for length in sorted({row["length"] for row in _rows(result)}):
        rows = {row["kernel"]: row for row in _rows(result) if row["length"] == length}
        cells = [f"{length:,}"]
        cells += [
            _cell(rows.get(kernel), "{forward:.0f}, {backward:.0f}") for kernel in _CONTENDERS
        ]
        cells += [_cell(rows.get(kernel), "{peak_mib:,.0f}") for kernel in _CONTENDERS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def speed_plot(result: dict[str, Any]) -> str:
    """Return the plot of TFLOP/s over the length as SVG; the backward is dashed."""
    lines = {}
    for kernel, (name, color) in _CONTENDERS.items():
        for part in ("forward", "backward"):
            points = _points(result, kernel, part)
            if points:
                lines[f"{name}, {part}"] = Line(points, color, dashed=part == "backward")
    title = f"Causal attention, D = {HEAD_DIM}, {result['machine']}"
    return line_plot(
        title, lines, x_label="tokens of a sequence", y_label="TFLOP/s", x_text=_tokens
    )


def memory_plot(result: dict[str, Any]) -> str:
    """Return the plot of the peak of memory over the length as SVG; lines end where memory does."""
    lines = {
        name: Line(points, color)
        for kernel, (name, color) in _CONTENDERS.items()
        if (points := _points(result, kernel, "peak_mib"))
    }
    title = f"Memory of forward and backward, D = {HEAD_DIM}, {result['machine']}"
    return line_plot(
        title, lines, x_label="tokens of a sequence", y_label="MiB", log_y=True, x_text=_tokens
    )


def _sources(files: dict[str, list[int]]) -> str:
    """Name the newest result file, and older ones with the lengths that come from them."""
    newest, *older = files
    names = [f"`benchmarks/results/{newest}`"]
    for file in older:
        lengths = ", ".join(f"{length:,}" for length in files[file])
        names.append(f"{lengths}: `{file}`")
    return "; ".join(names)


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["head_dim"] == HEAD_DIM and row["causal"]]


def _points(result: dict[str, Any], kernel: str, field: str) -> list[tuple[float, float]]:
    rows = [row for row in _rows(result) if row["kernel"] == kernel and field in row]
    return sorted((row["length"], row[field]) for row in rows)


def _cell(row: dict[str, Any] | None, text: str) -> str:
    if row is None or "unsupported" in row:
        return ""
    return "does not fit" if row.get("out_of_memory") else text.format(**row)


def _tokens(length: float) -> str:
    return f"{length / 1024:g}k" if length >= 1024 else f"{length:g}"
