"""Measures decoding and the time to the first token of many model shapes, and prints one table.

Each shape is measured by `tessera bench engine` in a process of its own, with random weights. A shape that fails or
takes too long does not end the run.

    python -m benchmarks.shapes [--shapes all] [--out results/] [--commit abc1234] [flags of tessera bench engine]
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import time
from typing import TYPE_CHECKING, Any

from benchmarks.report import add_bookkeeping, write_report
from benchmarks.service import bench

if TYPE_CHECKING:
    from collections.abc import Sequence

ALL = "all"
SHAPES = (
    "smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3.5-0.8b", "gemma-3-1b", "tinyllama-1.1b",
    "lfm2-1.2b", "llama-3.2-1b", "qwen2.5-1.5b", "falcon-h1-1.5b", "qwen3-1.7b", "qwen3.5-2b", "granite-4.0-h-micro",
    "llama-3.2-3b", "qwen3-4b", "qwen3.5-4b", "mistral-7b", "llama-3.1-8b",
)  # fmt: skip
"""The measured shapes, from the smallest to the largest."""
COLUMNS = {
    "batch1": "batch 1, ms",
    "decode8": "8, tok/s",
    "decode64": "64, tok/s",
    "decode256": "256, tok/s",
    "ttft4096": "TTFT 4096, ms",
}
"""Workloads, and the titles of their columns in the table."""
_KEPT = ("dtype", "quantization", "kv_cache_dtype", "plan", "startup_seconds")
"""Entries of a shape's result that the common result keeps."""

# The mean context of a decode is 256 tokens, as with the defaults of `tessera bench engine`, in half of their steps.
_USUAL = (
    "--max-num-batched-tokens=8192",
    "--prompt-tokens=192",
    "--steps=128",
    "--idle-seconds=0.05",
)


def options(shape: str, device: str, more: Sequence[str] = ()) -> list[str]:
    """Return the options of `tessera bench engine` for a shape.

    Args:
        shape: its name.
        device: "cpu" or "cuda".
        more: further options; they replace the usual ones of the same name.
    """
    what = [f"--model={shape}", f"--device={device}", *_USUAL]
    return [*what, "--workloads", *COLUMNS, "--log-level=warning", *more]


def measure(
    shape: str, device: str, more: Sequence[str], seconds: float
) -> tuple[dict[str, Any] | None, str]:
    """Measure a shape in a process of its own.

    Args:
        shape: its name.
        device: "cpu" or "cuda".
        more: further options of `tessera bench engine`.
        seconds: after which the process is ended.

    Returns:
        The result of `tessera bench engine`, None if it failed; and why it failed.
    """
    flags = options(shape, device, more)
    print("$", shlex.join(["tessera", "bench", "engine", *flags]), flush=True)
    try:
        return bench("engine", flags, quiet=False, seconds=seconds), ""
    except subprocess.TimeoutExpired:
        return None, f"not measured within {seconds:g} s"
    except subprocess.CalledProcessError as error:
        return None, f"exit status {error.returncode}"


def table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Format the results in Markdown, one line per shape: each value, and its share of the roofline.

    Args:
        rows: of all shapes; each has "model" and "workload" besides the columns of `tessera bench engine`.
        names: the shapes, in the order of the lines; one without a row gets an empty line.
    """
    found = {(row["model"], row["workload"]): row for row in rows}
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in names:
        cells = [_cell(found.get((name, workload))) for workload in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the shapes; exit with status 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Other flags are passed on to `tessera bench engine`, as --quantization=fp8.",
        allow_abbrev=False,
    )
    parser.add_argument("--shapes", nargs="+", choices=(ALL, *SHAPES), default=[ALL],
        metavar="NAME", help=f"{ALL}, or one or more of {', '.join(SHAPES)}")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S",
        help="seconds after which a shape is given up (%(default)g)")  # fmt: skip
    add_bookkeeping(parser)
    arguments, more = parser.parse_known_args()
    names = SHAPES if ALL in arguments.shapes else tuple(dict.fromkeys(arguments.shapes))
    rows: list[dict[str, Any]] = []
    kept: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name in names:
        began = time.perf_counter()
        result, reason = measure(name, arguments.device, more, arguments.timeout)
        if result is None:
            failed[name] = reason
            continue
        rows += [row | {"model": name, "workload": _workload(row)} for row in result["rows"]]
        kept[name] = {key: result[key] for key in _KEPT if key in result}
        kept[name]["seconds"] = round(time.perf_counter() - began, 1)
    print(table(rows, names), flush=True)
    if rows:
        libraries = ("torch", "triton") if arguments.device == "cuda" else ("torch",)
        extra = {"shapes": kept} | ({"failed": failed} if failed else {})
        write_report("shapes", rows, libraries, device=arguments.device, folder=arguments.out,
            revision=arguments.commit, echo=False, extra=extra)  # fmt: skip
    if failed:
        raise SystemExit("; ".join(f"{name} failed: {why}" for name, why in failed.items()))


def _workload(row: dict[str, Any]) -> str:
    """Return the name of a row's workload; a row of another kind gets the name of its metric."""
    kinds = {"ms_per_token": "batch", "decode_tok_s": "decode", "ttft_ms": "ttft"}
    metric: str = row["metric"]
    if metric not in kinds:
        return metric
    size = row["prompt_tokens"] if metric == "ttft_ms" else row["batch"]
    return f"{kinds[metric]}{size}"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    value, share = row["value"], row["roofline"]
    # Four significant digits, and no exponent.
    shown = f"{value:,.0f}" if value >= 1e4 else f"{value:g}"
    return shown if share is None else f"{shown} ({share:.0%})"


if __name__ == "__main__":
    main()
