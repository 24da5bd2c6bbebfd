"""There are no import cycles, not even for types alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels", "model", "server")


def modules(root):
    """Map the names of all modules below `root` to their files."""
    found = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name, path, known):
    """Return the modules that a module imports: at its top, for types alone and inside functions."""
    wanted = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            wanted.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # A name that is not a module is an attribute of the module it is imported from.
            wanted |= {module if module in known else str(node.module) for module in inner}
    return wanted & known - {name}


def cycles(root=ROOT):
    """List the groups of modules that import each other, directly or through other modules."""
    files = modules(root)
    graph = {name: imports(name, path, files.keys()) for name, path in files.items()}
    reached = {name: _reached(graph, name) for name in graph}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph
    }
    return sorted(sorted(group) for group in groups if group)


def _reached(graph, start):
    found, left = set(), [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def test_there_are_no_import_cycles():
    assert cycles() == []


@pytest.mark.parametrize(
    ("a", "b", "cycle"),
    [
        ("import model.b", "from model import a", True),
        ("from model.b import x", "def f():\n    import model.a", True),
        ("from model.b import x", "if TYPE_CHECKING:\n    from model.a import y", True),
        ("from model import b", "x = 1", False),
        ("import model.a", "x = 1", False),
    ],
)
def test_a_cycle_is_found_wherever_the_import_statement_is(tmp_path, a, b, cycle):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.py").write_text(a)
    (tmp_path / "model" / "b.py").write_text(b)

    assert cycles(tmp_path) == ([["model.a", "model.b"]] if cycle else [])
