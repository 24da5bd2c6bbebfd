"""The tables of the stored formats and the families in docs/models.md, from the code and `benchmarks.parity`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import torch

from kernels.arch import CATALOGUE
from kernels.linear.registry import REGISTRY
from kernels.step.single_launch import unsupported as launch_unsupported
from kernels.step.weights import StepShape
from kernels.weight_format import WeightFormat, is_read_by_library
from model.checkpoint.formats.format import Format
from model.checkpoint.formats.table import FORMATS
from model.families.table import FAMILIES

RESULTS: Final = Path(__file__).parent.parent / "benchmarks" / "results"
_SHAPE: Final = StepShape(1024, 3072, 16, 8, 128, 151_936, 1e-6, 128**-0.5)
"""Of Qwen3-0.6B, which a single launch computes in each format that it reads."""
_GROUP: Final = 128
_CONVERTED: Final = "none: each product converts the weights first"


def newest_parity(folder: Path = RESULTS) -> dict[str, Any]:
    """Return the newest result of `benchmarks.parity`."""
    found = [
        {**json.loads(path.read_text()), "file": path.name}
        for path in folder.glob("*-parity-*.json")
    ]
    newest: dict[str, Any] = max(found, key=lambda it: str(it["date"]))
    return newest


def formats_table(result: dict[str, Any]) -> str:
    """Return the table of the stored formats, a row for each format in which a model holds what is stored.

    Args:
        result: of `benchmarks.parity`.
    """
    lines = [
        "| stored as | samples | in memory, as `GET /info` names it | tokens equal | largest difference | kernels that "
        "read it |",
        "|---|---|---|---|---|---|",
    ]
    for row in FORMATS:
        rows = [it for it in result["rows"] if (it["kind"], it["name"]) == ("format", row.name)]
        for held in dict.fromkeys(it["held"] for it in rows):
            its = [it for it in rows if it["held"] == held]
            form = WeightFormat(**its[0]["format"]) if its[0]["format"] else None
            samples = ", ".join(it["sample"] for it in its)
            cells = (_named(row), samples, f"`{held}`", *_parity(its, result), _readers(form))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join((*lines, "", _source(result)))


def families_table(result: dict[str, Any]) -> str:
    """Return the table of the families.

    Args:
        result: of `benchmarks.parity`.
    """
    lines = [
        "| architecture | variants | tokens equal | largest difference | quantized matrices in memory | "
        "single launch | C library |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        its = [it for it in result["rows"] if (it["kind"], it["name"]) == ("family", name)]
        packed = "as full numbers" if family.tensors.transposed else "as stored"
        paths = (_share([it[path] for it in its]) for path in ("single_launch", "cpu_library"))
        cells = (f"`{name}`", str(len(its)), *_parity(its, result), packed, *paths)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join((*lines, "", _source(result)))


def _named(row: Format) -> str:
    """Return what config.json says of a checkpoint in a format."""
    return ", ".join(f"`{value}`" for value in row.identity.values())


def _parity(rows: list[dict[str, Any]], result: dict[str, Any]) -> tuple[str, str]:
    """Return the fewest equal tokens and the largest difference of some rows of a result."""
    fewest = min(it["tokens"] for it in rows)
    largest = max(it["difference"] for it in rows)
    return f"{fewest} of {result['tokens']}", f"{largest:.0e}"


def _readers(form: WeightFormat | None) -> str:
    """Return the names of the kernels that read a format without converting it first."""
    if form is None:
        return "those of full numbers"
    with_groups = ""
    if form.float and form.group:
        # Tiny checkpoints have smaller groups than those that people have.
        form, with_groups = dataclasses.replace(form, group=_GROUP), f"with groups of {_GROUP}: "
    names = [row.name for row in REGISTRY if row.reads(form)]
    h100 = CATALOGUE["h100"]
    if not launch_unsupported(_SHAPE, torch.bfloat16, h100, weight_format=form):
        names.append("single_launch")
    if is_read_by_library(form):
        names.append("cpu_library")
    return with_groups + ", ".join(f"`{name}`" for name in names) if names else _CONVERTED


def _share(values: list[bool]) -> str:
    return "yes" if all(values) else "some variants" if any(values) else "no"


def _source(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"`{result['file']}`, with {versions}."
