"""The result file of a benchmark: measurements, machine, versions and commit."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
_CODE = ("benchmarks/*.py", "kernels", "model", "server")
_NOT_SHOWN = ("--commit", "--header", "--json", "--out")
"""Flags that do not change a result, or whose values may be secret; each takes a value."""


def processor_name() -> str:
    """Return the vendor's name of the host processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def host_name(threads: int, cores: int | None) -> str:
    """Return the host processor's name with the numbers of compute threads and of cores."""
    return f"{processor_name()}, {threads} of {cores} cores"


def code_commit() -> str:
    """Return the short hash of the checkout, with "-dirty" appended if its code differs from the commit.

    Returns "unknown" without a git repository.
    """

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    changes = git("status", "--porcelain", "--", *_CODE)
    return git("rev-parse", "--short", "HEAD").strip() + ("-dirty" if changes.strip() else "")


def record(
    topic: str,
    rows: list[dict[str, Any]],
    *,
    machine: str,
    versions: dict[str, str],
    command: str,
    commit: str | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build a result.

    Args:
        topic: one word for the kind of measurement.
        rows: one flat record per measurement.
        machine: name of the measured machine.
        versions: of the libraries that the result depends on, without Python's.
        command: command that repeats the measurement.
        commit: commit of the code; None takes that of the checkout.
        extra: further entries before the rows.
    """
    return {
        "topic": topic,
        "machine": machine,
        "versions": {"python": platform.python_version()} | versions,
        "commit": commit or code_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        **(extra or {}),
        "rows": rows,
    }


def write(result: dict[str, Any], path: Path, kind: str, model: str | None = None) -> Path:
    """Write a result.

    Args:
        result: from `record`.
        path: of the file. An existing folder, or a path without a suffix, is a folder for a file with the name
            `<kind>-<topic>-<commit>.json`, or with a model `<kind>-<topic>-<model>-<commit>.json`.
        kind: "cpu", or the GPU's short name.
        model: for topics with one result for each model.

    Returns:
        The file written.
    """
    if path.is_dir() or not path.suffix:
        words = (kind, result["topic"], model, result["commit"])
        path = path / f"{'-'.join(word for word in words if word)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def model_label(model_id: str) -> str:
    """Return a model's name for the rows: the last part of its path or id, in lower case."""
    return Path(model_id).name.lower()


def number(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def shown_command(command: Sequence[str], arguments: Sequence[str]) -> str:
    """Return a command line for a result, without flags that do not change it and without secrets."""
    words = list(command)
    skip = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in _NOT_SHOWN:
            skip = not equals
        else:
            words.append(word)
    return shlex.join(words)
