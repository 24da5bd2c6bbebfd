"""A wheel has one top-level package, which works beside another package named `kernels`."""

from __future__ import annotations

import ast
import email
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import tessera.kernels
import tessera.kernels.attention.training.huggingface

import kernels
import kernels.attention.training.huggingface
from deploy import build_hook
from deploy.build_hook import PACKAGES, place_packages, renamed, wheel_platform

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INFO = ".dist-info"
MODULES = {"kernels", "kernels.arch", "kernels.attention", "server.cli.main"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder of packages as a wheel installs them, with another package named `kernels`."""
    folder = tmp_path_factory.mktemp("site-packages")
    for source, target in place_packages(ROOT, tmp_path_factory.mktemp("renamed")).items():
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(source)
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_public_names_are_those_of_the_installation(installed):
    program = """
import sys, tessera
from tessera import *
print(*{it.__module__.partition(".")[0] for it in map(globals().get, tessera.__all__) if hasattr(it, "__module__")})
print(*[name for name in sys.modules if name.split(".")[0] in ("model", "server")])
"""

    assert run(installed, "-c", program).splitlines() == ["tessera", ""]


def test_a_source_tree_has_the_names_of_an_installation():
    assert tessera.kernels is kernels
    assert tessera.kernels.attention.training.huggingface is kernels.attention.training.huggingface
    assert kernels.__spec__.name == "kernels"
    with pytest.raises(ModuleNotFoundError, match=r"tessera\.kernels\.nothing"):
        __import__("tessera.kernels.nothing")


@pytest.mark.parametrize(
    ("environment", "supported", "platform"),
    [
        (
            {},
            ["manylinux_2_39_x86_64", "manylinux_2_28_x86_64", "linux_x86_64"],
            "manylinux_2_28_x86_64",
        ),
        ({}, ["macosx_15_0_arm64", "macosx_11_0_arm64"], "macosx_11_0_arm64"),
        ({}, ["manylinux_2_17_x86_64", "linux_x86_64"], "any"),
        ({}, ["musllinux_1_2_x86_64"], "any"),
        ({}, ["win_amd64"], "any"),
        ({"WHEEL_PLATFORM": ""}, ["win_amd64"], "any"),
        ({"WHEEL_PLATFORM": "any"}, ["manylinux_2_28_x86_64"], "any"),
        ({"WHEEL_PLATFORM": "macosx_11_0_arm64"}, ["manylinux_2_28_x86_64"], "macosx_11_0_arm64"),
    ],
)
def test_a_wheel_is_for_this_machine_or_the_platform_of_the_variable(
    environment, supported, platform
):
    assert wheel_platform(environment, supported) == platform


def test_an_unknown_platform_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match="'win_amd64'; it must be one of manylinux_2_28_x86_64, "):
        wheel_platform({"WHEEL_PLATFORM": "win_amd64"}, [])


@pytest.mark.parametrize(("version", "where"), [("standard", "wheel"), ("editable", "tree")])
def test_a_library_is_in_the_wheel_and_its_platform_in_the_tag(
    monkeypatch, tmp_path, version, where
):
    for folder in ("kernels/cpu/native", "kernels/cpu/lib", "deploy/package/tessera"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "kernels/cpu/lib/of_another_platform.so").touch()
    monkeypatch.setenv("WHEEL_PLATFORM", "macosx_11_0_arm64")
    compiled = []
    monkeypatch.setattr(build_hook, "compile_library", lambda *it: compiled.append(it))
    hook = build_hook.PackageBuildHook(str(tmp_path), {}, None, None, "", "wheel")
    data = {"force_include": {}}

    hook.initialize(version, data)
    hook.finalize(version, data, "")

    ((source, output, target, processor),) = compiled
    assert source == tmp_path / "kernels/cpu/native/step.c"
    assert (target, processor) == ("aarch64-macos.11.0", "apple_m1")
    assert (data["tag"], data["pure_python"]) == ("py3-none-macosx_11_0_arm64", False)
    if where == "wheel":
        assert data["force_include"] == {str(output): "tessera/kernels/cpu/lib/neon.dylib"}
    else:
        assert data["force_include"] == {}
        assert output == tmp_path / "kernels/cpu/lib/neon.dylib"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_source_distribution_makes_the_wheel_of_the_tree(tmp_path):
    # Without a C library: the compiler is not among the packages of the tests.
    def build(kind, folder):
        program = f"import hatchling.build as it; print(it.build_{kind}({str(tmp_path)!r}))"
        environment = os.environ | {"WHEEL_PLATFORM": "any"}
        found = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True,
            env=environment,
        )  # fmt: skip
        return tmp_path / found.stdout.split()[-1]

    name = f"tessera-{PROJECT['version']}"
    source = build("sdist", ROOT)
    with tarfile.open(source) as archive:
        in_source = {it.removeprefix(f"{name}/") for it in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    wheel = build("wheel", tmp_path / name)
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        texts = {it.rpartition("/")[2]: archive.read(it).decode() for it in in_wheel if INFO in it}

    assert source.name == f"{name}.tar.gz"
    assert {it.partition("/")[0] for it in in_source} == {
        ".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "deploy", "kernels", "model",
        "pyproject.toml", "server",
    }  # fmt: skip
    assert {it.split("/")[1] for it in in_source if it.startswith("deploy/")} == {
        "build_hook.py",
        "package",
    }
    assert {it for it in in_source if it.startswith("model/training/")} == set()
    assert "kernels/cpu/native/step.c" in in_source

    assert wheel.name == f"{name}-py3-none-any.whl"
    assert {it.partition("/")[0] for it in in_wheel} == {"tessera", f"{name}{INFO}"}
    placed = set(place_packages(ROOT, tmp_path / "placed").values())
    assert {it for it in in_wheel if INFO not in it} == placed
    assert {"tessera/py.typed", "tessera/model/bundled/tokenizer.json"} <= placed
    assert not [
        it
        for it in placed
        if "/native/" in it or it.startswith("tessera/model/training") or ".pyi" in it
    ]
    assert "tessera = tessera.server.cli.main:main" in texts["entry_points.txt"]
    assert "Tag: py3-none-any" in texts["WHEEL"]
    metadata = email.message_from_string(texts["METADATA"])
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert len(metadata.get_all("Project-URL")) == 5
