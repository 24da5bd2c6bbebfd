"""The result file of a benchmark: what was measured, on what, with which code. Knows nothing of what the rows mean."""

from __future__ import annotations

import datetime
import json
import platform
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[3]
_CODE = ("benchmarks/*.py", "kernels", "model", "server")


def processor_name() -> str:
    """The host processor as its vendor calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def code_commit() -> str:
    """Short hash of the checkout; "-dirty" follows where its code is not what was committed.

    "unknown" for a copy of the tree without its history.
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
    """Put a result together.

    Args:
        topic: names the question.
        rows: one flat record per measurement.
        machine: that was measured.
        versions: of the libraries the result depends on, beside Python's.
        command: that measures it again.
        commit: of the code; None asks git.
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
        path: of the file; in a folder, there or without a suffix, it gets the name `<kind>-<topic>-<commit>.json`, or
            with a model `<kind>-<topic>-<model>-<commit>.json`.
        kind: "cpu", or the GPU's short name.
        model: that the result is of, where there is one for each.

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
    """A model's name in the rows: the last part of its path or id, in lower case."""
    return Path(model_id).name.lower()


def number(value: float) -> float:
    """Round to four digits that mean something."""
    return float(f"{value:.4g}")


def without(arguments: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """Leave out some flags and their values, as those that say where a result goes or that are secret."""
    words: list[str] = []
    skip = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in hidden:
            skip = not equals
        else:
            words.append(word)
    return words
