"""Folders are rooms: none is overfull, and no two beside each other import from one another."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    file.relative_to(ROOT)
    for package in ("kernels", "model", "server")
    for file in (ROOT / package).rglob("*.py")
}
MODULES = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}
MOST_FILES = 16
TABLES = {Path("model/families")}
"""Folders that are tables: a file is a row."""


def imported(file):
    """Yield the modules of this project that a file imports anywhere, for types too."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in full)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_two_folders_of_a_folder_import_from_each_other():
    imports = defaultdict(set)
    for file in FILES:
        for name in imported(file):
            if name not in MODULES:
                continue
            own, other = file.parent.parts, MODULES[name].parent.parts
            shared = 0
            while shared < min(len(own), len(other)) and own[shared] == other[shared]:
                shared += 1
            if shared < min(len(own), len(other)):
                rooms = "/".join(own[: shared + 1]), "/".join(other[: shared + 1])
                imports[rooms].add(f"{file} imports {name}")

    assert len(imports) > 50
    both = {rooms for rooms in imports if rooms[::-1] in imports}
    assert not both, "\n".join(line for rooms in sorted(both) for line in sorted(imports[rooms]))


def test_a_folder_has_few_files():
    counts = defaultdict(int)
    for file in FILES:
        counts[file.parent] += file.name != "__init__.py"

    overfull = {str(folder): count for folder, count in counts.items() if count > MOST_FILES}
    assert not {folder for folder in overfull if Path(folder) not in TABLES}, overfull
