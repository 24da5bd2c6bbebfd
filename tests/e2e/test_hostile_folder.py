"""No command imports code from the folder that it is started in."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Service
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PACKAGES = ("server", "kernels", "model")
MODULES = ("msgspec", "torch", "json", "pickle", "selectors", "tqdm", "triton")
GRAMMAR = {
    "inputs": "x",
    "parameters": {
        "max_new_tokens": 2,
        "grammar": {"type": "regex", "value": "[0-9]{2}"},
    },
}


@pytest.fixture
def folder(tmp_path):
    """A folder whose modules, once imported, leave a file with their name, and end the process."""
    folder = tmp_path / "hostile"
    for name in (*PACKAGES, *MODULES):
        path = folder / name / "__init__.py" if name in PACKAGES else folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        target = tmp_path / f"{name}.imported"
        path.write_text(f"open({str(target)!r}, 'w').close()\nraise SystemExit(99)\n")
    return folder


@pytest.fixture
def script(tmp_path):
    """The `tessera` command as pip installs it: a script in a folder of its own."""
    path = tmp_path / "bin" / "tessera"
    path.parent.mkdir()
    path.write_text("from server.cli.main import main\nif __name__ == '__main__':\n    main()\n")
    return path


def imported(folder):
    return sorted(path.name for path in folder.parent.glob("*.imported"))


@pytest.mark.slow
def test_the_service_and_its_children_import_nothing_from_the_working_directory(folder, script):
    service = Service(
        ["--device=cpu", "--frontends=2"],
        {"PYTHONPATH": str(ROOT)},
        program=[str(script)],
        folder=folder,
    )
    try:
        service.wait_until_healthy()
        reply = httpx.post(f"{service.url}/generate", json=GRAMMAR, timeout=GIVE_UP)
        assert reply.status_code == 200, reply.text
    finally:
        service.stop()

    assert imported(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--device=cpu"),
        ("bench", "--help"),
        ("warmup", "--device=cpu"),
        (
            "bench",
            "serve",
            "--prompts=4",
            "--warm-up=0",
            "--concurrency=2",
            "--processes=2",
            "--output-len=4",
        ),
    ],
)
def test_the_commands_import_nothing_from_the_working_directory(
    folder, script, arguments, bundled_service
):
    if arguments[:2] == ("bench", "serve"):
        arguments = (*arguments, f"--url={bundled_service.url}")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert imported(folder) == []
    assert done.returncode == 0, done.stderr
