"""Modules do not import each other in a cycle, not even for types alone."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACYCLIC = {"kernels": ("kernels.step",)}
"""Packages without a cycle, and parts of them that are not checked."""


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source, modules):
    """Modules that a source imports anywhere: also inside a function, or for types alone."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= members & modules or {node.module}
    return found & modules


@pytest.mark.parametrize("package", ACYCLIC)
def test_no_module_imports_itself_by_way_of_others(package):
    paths = {module_name(path): path for path in (ROOT / package).rglob("*.py")}
    checked = {name for name in paths if not name.startswith(ACYCLIC[package])}
    graph = {name: imported(paths[name].read_text(), checked) for name in checked}

    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules of a cycle


def test_an_import_for_types_alone_counts():
    modules = {"a", "a.b", "a.c"}
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.b import x\n"

    assert imported(source, modules) == {"a.b"}
    assert imported("def f():\n    from a import c", modules) == {"a.c"}
    assert imported("from a import x\nimport a.b", modules) == {"a", "a.b"}
