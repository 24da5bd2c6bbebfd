"""Builds the site of the documents once."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build_site(folder, change=lambda docs: None):
    """Copy the documents into a folder, change the copy, and build the site as `make site` does."""
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", folder)
    change(folder / "docs")
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("documents")
    built = build_site(folder)
    assert not built.returncode, built.stdout + built.stderr
    return folder / "site"
