"""A wheel has one top-level package, which works beside another package named `kernels`."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import tessera.kernels
import tessera.kernels.attention.training.huggingface

import kernels
import kernels.attention.training.huggingface
from deploy.build_hook import PACKAGES, place_packages, renamed

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"kernels", "kernels.arch", "kernels.attention", "server.cli.main"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder of packages as a wheel installs them, with another package named `kernels`."""
    folder = tmp_path_factory.mktemp("site-packages")
    for source, target in place_packages(ROOT, tmp_path_factory.mktemp("renamed")).items():
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(source)
    shutil.copy(ROOT / "deploy/package/tessera/__init__.py", folder / "tessera/__init__.py")
    (folder / "kernels").mkdir()
    (folder / "kernels/__init__.py").write_text("NAME = 'the other one'\n")
    return folder


def run(installed, *arguments):
    """Run Python outside the source tree, with the folder first in its path."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=installed,
        env=os.environ | {"PYTHONPATH": str(installed)},
    ).stdout


def test_an_installation_works_beside_another_package_named_kernels(installed):
    program = """
import sys, kernels, torch, transformers
from tessera.kernels import flash_attention
from tessera.kernels.attention.training import huggingface
huggingface.register()
config = transformers.LlamaConfig(
    vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)
config._attn_implementation = "tessera"
model = transformers.LlamaForCausalLM(config)
model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
print(kernels.NAME, model.config._attn_implementation)
print([name for name in sys.modules if name.split(".")[0] in ("model", "server")])
"""

    assert run(installed, "-c", program).splitlines() == ["the other one tessera", "[]"]


def test_an_installed_command_finds_its_modules(installed):
    program = "from tessera.server.cli.main import main; main()"

    found = run(installed, "-c", program, "plan", "--arch=h100")

    assert "hopper_prefill is the first row" in found


def test_child_processes_of_an_installation_do_not_get_the_short_names(installed):
    program = """
import os
from tessera.server.engine.link import spawn
spawn.use_safe_path()
print(spawn.ENGINE_COMMAND[-1], *os.environ["PYTHONPATH"].split(os.pathsep))
"""

    module, *folders = run(installed, "-c", program).split()

    assert module == "tessera.server.engine.link.engine_process.process"
    assert str(installed / "tessera") not in folders


def test_no_module_of_an_installation_names_a_package_without_tessera(installed):
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    for path in (installed / "tessera").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = []
            if isinstance(node, ast.ImportFrom):
                named = [node.module]
            elif isinstance(node, ast.Import):
                named = [it.name for it in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = [node.value] if node.value.partition(":")[0] in modules else []
                named = [it for it in named if "." in it]
            assert not any(it.split(".")[0] in PACKAGES for it in named), (path, named)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from kernels.arch import detect", "from tessera.kernels.arch import detect"),
        ("import kernels", "from tessera import kernels"),
        ("import kernels.arch as it", "import tessera.kernels.arch as it"),
        ("if 1:\n    import kernels", "if 1:\n    from tessera import kernels"),
        ("x = 'é', 'kernels.arch:detect'", "x = 'é', 'tessera.kernels.arch:detect'"),
        ("run('server.cli.main')", "run('tessera.server.cli.main')"),
        ("'kernels.unknown', 'kernels', 'model.safetensors'",) * 2,
        ("from kernels_of_others import x",) * 2,
        ("from . import kernels",) * 2,
    ],
)
def test_imports_and_names_of_modules_are_renamed(before, after):
    assert renamed(before.encode(), MODULES).decode() == after


@pytest.mark.parametrize("text", ["import kernels.arch", "import kernels, os"])
def test_an_import_that_cannot_be_renamed_fails_the_build(text):
    with pytest.raises(ValueError, match="line 1: write `from kernels"):
        renamed(text.encode(), MODULES)


def test_a_source_tree_has_the_names_of_an_installation():
    assert tessera.kernels is kernels
    assert tessera.kernels.attention.training.huggingface is kernels.attention.training.huggingface
    assert kernels.__spec__.name == "kernels"
    with pytest.raises(ModuleNotFoundError, match=r"tessera\.kernels\.nothing"):
        __import__("tessera.kernels.nothing")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_has_one_top_level_package(tmp_path):
    tree = tmp_path / "tree"
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in names.stdout.splitlines():
        if name.partition("/")[0] in (*PACKAGES, "deploy") or "/" not in name:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    # A platform without a C library: the compiler is not among the packages of the tests.
    program = """
import platform
from hatchling.build import build_wheel
platform.machine = lambda: "other"
print(build_wheel("."))
"""
    built = subprocess.run(
        [sys.executable, "-c", program], cwd=tree, capture_output=True, text=True, check=True
    )

    with zipfile.ZipFile(tree / built.stdout.split()[-1]) as wheel:
        files = wheel.namelist()
        entry = next(it for it in files if it.endswith("entry_points.txt"))
        assert "tessera = tessera.server.cli.main:main" in wheel.read(entry).decode()
    assert {it.partition("/")[0] for it in files} == {
        "tessera",
        f"tessera-{PROJECT['version']}.dist-info",
    }
    assert "tessera/model/bundled/tokenizer.json" in files
    assert not [it for it in files if "/native/" in it or "/model/training/" in it]
