"""Compute capabilities are compared in one file; every other file uses named capabilities."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOME = ROOT / "kernels" / "arch.py"
NUMBERS = {"sm", "major", "minor", "compute_capability", "get_device_capability"}
"""Names of variables and attributes that contain a compute capability."""
FILES = sorted(
    path for package in ("kernels", "model", "server") for path in (ROOT / package).rglob("*.py")
)


def comparisons(source):
    """List the lines that compare a compute capability or calculate with one; `is None` and text do not count."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if _compares(node)]


def _compares(node):
    if isinstance(node, ast.Compare):
        absent = all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops)
        return not absent and any(map(_has_capability, (node.left, *node.comparators)))
    return isinstance(node, ast.BinOp) and _has_capability(node)


def _has_capability(node):
    if isinstance(node, ast.JoinedStr):
        return False
    name = getattr(node, "attr", None) or getattr(node, "id", None)
    return name in NUMBERS or any(map(_has_capability, ast.iter_child_nodes(node)))


def test_only_one_file_compares_compute_capabilities():
    found = {
        str(path.relative_to(ROOT)): lines
        for path in FILES
        if path != HOME and (lines := comparisons(path.read_text()))
    }

    assert found == {}
    assert comparisons(HOME.read_text())


@pytest.mark.parametrize(
    "line",
    [
        "arch.sm < 80", "if sm == _HOPPER: pass", "80 <= arch.sm <= 129", "known // 10 == sm // 10",
        "arch.sm in spec.sm", "detect(device).sm != 90", "torch.cuda.get_device_capability() >= (8, 0)",
        "properties.major * 10",
    ],
)  # fmt: skip
def test_a_comparison_is_found(line):
    assert set(comparisons(line)) == {1}


@pytest.mark.parametrize(
    "line",
    [
        "arch.has_triton",
        "table(arch.sm)",
        "arch.unsupported(spec.sm)",
        "row.sm is None",
        'a / f"sm_{sm}"',
    ],
)
def test_a_named_capability_is_not_a_comparison(line):
    assert comparisons(line) == []
