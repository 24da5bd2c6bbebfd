"""Writes the pinned requirements of the images into `deploy/requirements`, with `python -m deploy.lock`.

`service.txt` has the packages of the images `cpu` and `gpu`, `ray.txt` those of the image `ray`, `tools.txt` what
builds the wheel and the SBOM; each with the hashes of all files of PyPI, for all platforms and Python 3.11 or newer.
`torch-cpu.txt` and `torch-gpu.txt` pin PyTorch and Triton by version only: an image takes them from an index of its own
(`TORCH_INDEX_URL`), whose builds have other hashes than PyPI's. NVIDIA's libraries are pinned by PyTorch itself.
docs/decisions/0038-lock-file.md has the reasons. Needs uv (`pip install uv`); `make lock` installs it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "deploy/requirements"
PYTHON: Final = "3.11"
"""The oldest Python of an image."""
_COMMAND: Final = "python -m deploy.lock"
# PyTorch, and what its builds for GPUs need and pin themselves.
_BY_TORCH: Final = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
_PINNED: Final = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)
_HEADER: Final = f"# Written by {_COMMAND}.\n"


class LockError(Exception):
    """uv is missing or found no solution; the text is for the user, and empty if uv has said why."""


def main() -> None:
    """Write the files; exits with status 1 and a message if it fails."""
    parser = argparse.ArgumentParser(description="Pin the packages of the images.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = parser.parse_args()
    try:
        lock(FOLDER, upgrade=options.upgrade)
    except LockError as error:
        sys.exit(f"error: {error}" if str(error) else 1)


def lock(folder: Path, *, upgrade: bool = False) -> None:
    """Write all files of requirements.

    Args:
        folder: of the files. Versions in files that exist are kept where they still fit.
        upgrade: take the newest versions instead.

    Raises:
        LockError: uv is missing or found no solution.
    """
    project = ROOT / "pyproject.toml"
    service, ray = folder / "service.txt", folder / "ray.txt"
    flags = ("--upgrade",) if upgrade else ()
    # The largest set first. The others take its versions, so that the image `ray` replaces none.
    gpu = _compile(ray, [project], "--extra=gpu", "--extra=ray", *flags)
    _compile(service, [project], "--extra=gpu", f"--constraints={ray}", *flags)
    with tempfile.TemporaryDirectory() as temporary:
        # The image `cpu` has a newer PyTorch than `gpu`, which must not need other packages.
        unused = Path(temporary) / "cpu.txt"
        cpu = _compile(unused, [project], f"--constraints={service}", "--upgrade")
        if missing := pins(unused.read_text()).keys() - pins(service.read_text()).keys():
            raise LockError(f"{service.name} lacks {', '.join(sorted(missing))}")
        tools = Path(temporary) / "tools.in"
        tools.write_text("\n".join(["hatchling", "cyclonedx-bom", _compiler()]))
        _compile(folder / "tools.txt", [tools], *flags)
    _write(folder / "torch-cpu.txt", [f"torch=={cpu['torch']}"])
    _write(folder / "torch-gpu.txt", [f"torch=={gpu['torch']}", f"triton=={gpu['triton']}"])


def pins(text: str) -> dict[str, str]:
    """Return the version of each package of a file of requirements; one of several for different Pythons."""
    return dict(_PINNED.findall(text))


def _compile(output: Path, sources: Sequence[Path], *flags: str) -> dict[str, str]:
    """Write the packages that sources need, but those that PyTorch determines; returns the versions of all."""
    with tempfile.TemporaryDirectory() as temporary:
        everything = Path(temporary) / "all.txt"
        if output.exists():
            shutil.copy(output, everything)
        _uv([*map(str, sources), *flags, f"--output-file={everything}"])
        found = pins(everything.read_text())
        # The versions that were just found, also if an index changes between the two calls.
        known = [f"--constraints={everything}"]
        dropped = [f"--no-emit-package={name}" for name in found if _BY_TORCH.fullmatch(name)]
        hashes = ["--generate-hashes", "--no-annotate", f"--output-file={output}"]
        _uv([*map(str, sources), *flags, *known, *dropped, *hashes])
    return found


def _uv(arguments: Iterable[str]) -> None:
    program = shutil.which("uv")
    if program is None:
        raise LockError("uv is not installed: make lock, or pip install uv")
    # Without the settings of this machine, so that files of everybody who runs this are the same.
    command = [program, "pip", "compile", "--quiet", "--universal", "--no-config"]
    index = ("--default-index", "https://pypi.org/simple", f"--python-version={PYTHON}")
    label = f"--custom-compile-command={_COMMAND}"
    if subprocess.run([*command, *index, label, *arguments], check=False).returncode:
        raise LockError


def _compiler() -> str:
    """Return the requirement of the compiler, which is a build hook's and cannot be imported without hatchling."""
    text = (ROOT / "deploy/build_hook.py").read_text()
    found = re.search(r'^COMPILER = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise LockError("deploy/build_hook.py has no COMPILER")
    return found[1]


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text(_HEADER + "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
