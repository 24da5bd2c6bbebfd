"""PyTorch's private names are used in one file only."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRAPPER = ROOT / "kernels" / "torch_private.py"
FOLDERS = ("kernels", "model", "server", "benchmarks", "deploy", "docs")


def private_names(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if path.startswith("torch.") and node.attr.startswith("_") and node.attr[:2] != "__":
                yield path


def test_private_names_of_pytorch_are_used_in_one_file():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]

    found = {file: list(private_names(file.read_text())) for file in files}

    assert found.pop(WRAPPER)
    assert {file.name: names for file, names in found.items() if names} == {}


def test_a_private_name_is_found_anywhere_in_a_path():
    source = "x = torch.ops.aten._private(1)\ny = torch._C.thing\nz = torch.__version__"

    assert list(private_names(source)) == ["torch.ops.aten._private", "torch._C"]
