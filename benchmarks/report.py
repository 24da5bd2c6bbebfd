"""Writes the result file of a benchmark script and prints its rows."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import torch

from server.cli.bench import result

RESULTS = Path(__file__).parent / "results"


def add_bookkeeping(parser: argparse.ArgumentParser) -> None:
    """Add the options `--out` and `--commit`, the `folder` and `revision` of `write_report`."""
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--commit", help="commit of the code, if there is no .git")


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
    """Write `<gpu or cpu>-<topic>-<commit>.json` and print the rows.

    Args:
        topic: one word for what was measured.
        rows: one flat record per measurement.
        libraries: packages on whose version the result depends.
        device: the measured device, "cpu" or "cuda".
        folder: folder to write to; None for `benchmarks/results`.
        revision: commit of the code; None asks git.
        echo: whether to print the rows.
        extra: further entries, written before the rows.

    Returns:
        The path of the file.
    """
    root, script = RESULTS.parent.parent, Path(sys.argv[0]).resolve()
    script = script.relative_to(root) if script.is_relative_to(root) else Path(script.name)
    script = script.parent if script.stem == "__main__" else script.with_suffix("")  # of a package
    on_gpu = device == "cuda"
    record = result.record(
        topic,
        rows,
        machine=torch.cuda.get_device_name()
        if on_gpu
        else result.host_name(torch.get_num_threads(), os.cpu_count()),
        versions={name: importlib.metadata.version(name) for name in libraries},
        command=result.shown_command(["python", "-m", ".".join(script.parts)], sys.argv[1:]),
        commit=revision,
        extra=extra,
    )
    kind = torch.cuda.get_device_name().split()[1].lower() if on_gpu else "cpu"
    for row in rows if echo else ():
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    path = result.write(record, folder or RESULTS, kind)
    print(path)
    return path
