"""Limits of keys in config.json, and names of types of layers."""

import ast
from pathlib import Path

from model import families


def constants(path):
    """Yield the limits and texts that a module defines, by their names without leading underscores."""
    for statement in ast.parse(path.read_text()).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        value, text = statement.value, ast.unparse(statement.value)
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if is_text or text.startswith("Meta("):
            target = (
                statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            )
            yield ast.unparse(target).lstrip("_"), text


def test_a_limit_that_several_families_share_stands_once():
    found = {}
    for path in sorted(Path(families.__file__).parent.rglob("*.py")):
        for constant in constants(path):
            found.setdefault(constant, []).append(path.name)

    assert ("INNER", "Meta(ge=1, le=2 ** 20)") in found
    assert {it: names for it, names in found.items() if len(names) > 1} == {}
