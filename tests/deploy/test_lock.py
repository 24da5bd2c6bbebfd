"""The pinned requirements of the images fit pyproject.toml, and contain no hashes of PyTorch."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy import lock

FILES = ("service.txt", "ray.txt", "tools.txt")
TEXTS = {path.name: path.read_text() for path in lock.FOLDER.glob("*.txt")}
PROJECT = tomllib.loads((lock.ROOT / "pyproject.toml").read_text())["project"]


def requirements(*extras):
    texts = [*PROJECT["dependencies"]]
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    return {it.name: it for it in map(Requirement, texts)}


@pytest.mark.parametrize(("name", "extras"), [("service.txt", ()), ("ray.txt", ("ray",))])
def test_every_dependency_is_pinned_to_a_version_that_the_project_allows(name, extras):
    pinned = lock.pins(TEXTS[name])
    needed = requirements(*extras)
    del needed["torch"]

    assert needed.keys() <= pinned.keys()
    assert all(it.specifier.contains(pinned[it.name]) for it in needed.values())


@pytest.mark.parametrize("name", FILES)
def test_every_package_has_hashes_and_no_index(name):
    blocks = re.split(r"^(?=[a-z])", TEXTS[name], flags=re.MULTILINE)[1:]

    assert len(blocks) >= len(lock.pins(TEXTS[name]))
    assert all("--hash=sha256:" in block for block in blocks)
    assert "://" not in TEXTS[name]


@pytest.mark.parametrize("name", FILES)
def test_what_pytorch_determines_is_left_to_its_index(name):
    assert not {it for it in lock.pins(TEXTS[name]) if re.match("torch|triton|nvidia-|cuda-", it)}


def test_pytorch_is_pinned_by_version():
    cpu, gpu = lock.pins(TEXTS["torch-cpu.txt"]), lock.pins(TEXTS["torch-gpu.txt"])

    assert cpu.keys() == {"torch"}
    assert requirements()["torch"].specifier.contains(cpu["torch"])
    assert [f"{name}=={version}" for name, version in gpu.items()] == PROJECT[
        "optional-dependencies"
    ]["gpu"]


def test_the_image_of_ray_replaces_no_package_of_the_service():
    service, ray = lock.pins(TEXTS["service.txt"]), lock.pins(TEXTS["ray.txt"])

    assert service.items() <= ray.items()


def test_a_missing_uv_is_named(monkeypatch):
    monkeypatch.setattr(lock.shutil, "which", lambda _: None)

    with pytest.raises(lock.LockError, match="uv is not installed"):
        lock.lock(Path("/nonexistent"))
