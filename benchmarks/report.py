"""Writes a benchmark's result file and prints its rows. Knows nothing of what was measured."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from server.cli.bench.result import code_commit, processor_name

RESULTS = Path(__file__).parent / "results"
_BOOKKEEPING = ("--out", "--commit")
"""Options that say where a result goes and what it is called, each with a value."""


def add_bookkeeping(parser: argparse.ArgumentParser) -> None:
    """Add the options `--out` and `--commit`, as `write_report` takes them: `folder` and `revision`."""
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--commit", help="of the code, where there is no .git")


def machine_name(device: str) -> str:
    """The GPU's name, or the processor's with the number of threads PyTorch uses.

    Args:
        device: that was measured, "cpu" or "cuda".
    """
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{processor_name()}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def write_report(
    topic: str,
    rows: list[dict[str, Any]],
    libraries: tuple[str, ...] = ("torch",),
    *,
    device: str = "cpu",
    folder: Path | None = None,
    revision: str | None = None,
    echo: bool = True,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write `<gpu or cpu>-<topic>-<commit>.json` and print the rows as a table.

    Args:
        topic: names the question.
        rows: one flat record per measurement.
        libraries: packages whose version the result depends on.
        device: that was measured, "cpu" or "cuda".
        folder: to write to; None takes `benchmarks/results`.
        revision: commit of the code; None asks git.
        echo: print the rows.
        extra: further entries beside the rows, as ceilings.

    Returns:
        The file written.
    """
    kind = "cpu" if device == "cpu" else torch.cuda.get_device_name().split()[1].lower()
    revision = revision or code_commit()
    folder = folder or RESULTS
    record = {
        "topic": topic,
        "machine": machine_name(device),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in libraries},
        "commit": revision,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        **(extra or {}),
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}-{topic}-{revision}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows if echo else ():
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    print(path)
    return path


def _command() -> str:
    """What was measured, as a command; where the result went is left out."""
    script = Path(sys.argv[0])
    words = sys.argv[1:]
    for option in _BOOKKEEPING:
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return " ".join(["python -m", f"{script.parent.name}.{script.stem}", *words])
