"""Installs this source tree into `.venv` for `make setup`; shows one line for each step, and large downloads.

PyPI's PyTorch for Linux needs gigabytes of CUDA libraries. Where there is no NVIDIA GPU, PyTorch is installed first,
from its index of CPU builds alone, so that no newer version of another index can take its place. All other packages
come from pip's own index. Imports only the standard library.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import IO

ROOT: Final = Path(__file__).parents[1]
CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
TESTED: Final = "torch<2.14"
"""What a source tree gets in addition to the package's own range: versions with which all tests run on each change."""
BUILDS: Final = ("auto", "cpu", "cuda", "default")
# Where pip gets packages, if the user says so.
_SOURCES: Final = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")
# Processors for which the index has CPU builds that differ from PyPI's.
_MACHINES: Final = ("x86_64", "amd64", "aarch64", "arm64")
# What pip says if an index has no suitable version or cannot be reached; the second one beside a constraint on PyTorch.
_NOT_FOUND: Final = ("No matching distribution found", "ResolutionImpossible")
# pip repeats a connection that failed, with a warning each.
_RETRY: Final = "WARNING: Retrying ("
_DOWNLOADING: Final = re.compile(rb"\s*Downloading ")
_LARGE: Final = re.compile(rb"\([\d.]+ [MG]B\)")
# A bar consists of hyphens, or of line-drawing characters in UTF-8.
_BAR: Final = re.compile(rb"\r|\s*(\x1b\[[\d;]*m)*(---|\xe2[\x94\x95])")
_CURSOR: Final = re.compile(rb"\x1b\[\?25[hl]")  # hides and shows it


class InstallError(Exception):
    """The installation failed; the text is for the user, and empty if a program has said why."""


def main() -> None:
    """Install; exits with status 1 and a message if it fails."""
    parser = argparse.ArgumentParser(description="Install this source tree into .venv.")
    parser.add_argument("--torch", choices=BUILDS, default="auto", help="build of PyTorch")
    parser.add_argument("--extras", default="", help="optional dependencies, such as test,dev")
    options = parser.parse_args()
    try:
        install(options.torch, options.extras)
    except InstallError as error:
        sys.exit(f"error: {error}" if str(error) else 1)
    except KeyboardInterrupt:
        sys.exit(130)  # as shells report it


def install(build: str, extras: str = "", root: Path = ROOT) -> None:
    """Create `.venv` if there is none, and install PyTorch, Tessera and its other packages into it.

    Args:
        build: one of `BUILDS`: "auto" is "cpu" where there is no NVIDIA GPU, "default" what pip's index has.
        extras: names of optional dependencies, separated by commas.
        root: of the source tree.

    Raises:
        InstallError: pip failed, or has no CUDA build although it was asked for.
    """
    venv = root / ".venv"
    python = venv / "bin/python"
    if not (venv / "bin/pip").exists():  # also if its creation was interrupted
        _say(f"Creating .venv with Python {platform.python_version()}")
        # As a command, because that says which of Debian's packages is missing.
        if subprocess.run([sys.executable, "-m", "venv", venv], check=False).returncode:
            raise InstallError
    installed = torch_version(venv)
    if (build == "cpu" and _is_other(installed, cpu=True)) or (
        build == "cuda" and _is_other(installed, cpu=False)
    ):
        _say(f"Removing PyTorch {installed}, which is another build")
        _check(pip(python, "uninstall", "--yes", "torch"))
    use_cpu, reason = choose(build, os.environ)
    if use_cpu:
        _say(f"Installing the CPU build of PyTorch ({reason})")
        if not _install_cpu_torch(python, root):
            _say(f"{CPU_INDEX} has none or cannot be reached: taking PyTorch from pip's own index")
    elif reason:
        _say(reason)
    _say("Installing Tessera and its packages" + (f" for {extras}" if extras else ""))
    target = f"{root}[{extras}]" if extras else str(root)
    _check(pip(python, "install", "--editable", target, TESTED))
    version = torch_version(venv)
    if build == "cuda" and _is_other(version, cpu=False):
        raise InstallError(f"TORCH=cuda: pip's index has only PyTorch {version}")
    if build != "auto":
        (venv / ".torch").write_text(build)
    _say(f"Installed into .venv, with PyTorch {version}")


def choose(build: str, environment: Mapping[str, str]) -> tuple[bool, str]:
    """Decide whether PyTorch comes from its index of CPU builds.

    Args:
        build: one of `BUILDS`.
        environment: variables; one that tells pip where to find packages decides for "auto".

    Returns:
        The decision, and its reason for the user; empty if there is nothing to decide.
    """
    if sys.platform != "linux" or platform.machine().lower() not in _MACHINES:
        return False, ""  # one build, without CUDA
    if build != "auto":
        return build == "cpu", f"TORCH={build}" if build == "cpu" else ""
    if given := [name for name in _SOURCES if environment.get(name)]:
        return False, f"{given[0]} is set: PyTorch comes from there (make serve TORCH=cpu does not)"
    if has_nvidia_gpu():
        return False, ""
    return True, "no NVIDIA GPU found; make serve TORCH=cuda takes the other one"


def has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Whether the NVIDIA driver lists a GPU.

    Args:
        root: folder with `proc`.
    """
    if any((root / "proc/driver/nvidia/gpus").glob("*")):
        return True
    tool = shutil.which("nvidia-smi")  # WSL has no such folder
    if tool is None:
        return False
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU " in listed.stdout


def torch_version(venv: Path) -> str | None:
    """Return the version of PyTorch in an environment, such as `2.13.0+cpu`; None if it has none."""
    for folder in venv.glob("lib/python3*/site-packages/torch-*.dist-info"):
        return folder.name.removeprefix("torch-").removesuffix(".dist-info")
    return None


def pip(python: Path, *arguments: str, errors: IO[bytes] | None = None) -> int:
    """Run pip and show only large downloads, with progress bars on a terminal, and what it writes to standard error.

    Args:
        python: of the environment.
        arguments: of pip.
        errors: file for what pip writes to standard error; None for this process's.

    Returns:
        The exit status.
    """
    variables = os.environ | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    if sys.stdout.isatty():
        # pip writes to a pipe, and would leave the bars out.
        columns = str(shutil.get_terminal_size().columns)
        variables |= {"FORCE_COLOR": "1", "COLUMNS": columns}
    command = [str(python), "-m", "pip", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=variables) as process:
        for part in shown(_chunks(process)):
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
    return process.returncode


def shown(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what of pip's output is shown: the names and progress bars of downloads of at least 1 MB.

    Args:
        chunks: the output, divided anywhere.
    """
    rest, is_large = b"", False
    for chunk in chunks:
        # A bar is drawn again after each carriage return.
        *parts, rest = re.split(rb"(?<=\n)|(?=\r)", rest + chunk)
        for part in (_CURSOR.sub(b"", part) for part in parts):
            if _DOWNLOADING.match(part):
                if is_large := bool(_LARGE.search(part)):
                    yield part
            elif is_large and _BAR.match(part):
                yield part


def _chunks(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    while chunk := os.read(process.stdout.fileno(), 65536):
        yield chunk


def _install_cpu_torch(python: Path, root: Path) -> bool:
    """Install PyTorch from its index of CPU builds; returns False if there is none for this Python or platform."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    torch = next(it for it in project["dependencies"] if re.match(r"torch\b(?!-)", it))
    source = ("--no-deps", "--index-url", CPU_INDEX, "--retries", "1")
    with tempfile.TemporaryFile() as errors:
        status = pip(python, "install", *source, torch, TESTED, errors=errors)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines(keepends=True)
    if status and any(text in line for text in _NOT_FOUND for line in lines):
        return False
    sys.stderr.writelines(line for line in lines if _RETRY not in line)
    if status:
        raise InstallError
    return True


def _is_other(version: str | None, *, cpu: bool) -> bool:
    """Whether a version of PyTorch is installed, and is not the wanted build."""
    return sys.platform == "linux" and version is not None and version.endswith("+cpu") != cpu


def _check(status: int) -> None:
    if status:
        raise InstallError


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
