"""Builds llama.cpp from the source package of llama-cpp-python, once for each version and set of flags."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VERSION: Final = "0.3.36"
"""Of llama-cpp-python, whose source package contains llama.cpp."""
CACHE: Final = Path("~/.cache/tessera-cpu-peers").expanduser()
TARGETS: Final = ("llama-bench", "llama-perplexity", "llama-quantize", "llama-server")

_COMMON: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
_AVX512: Final = tuple(
    f"-DGGML_{name}=OFF"
    for name in ("AVX_VNNI", "AVX512", "AVX512_BF16", "AVX512_VBMI", "AVX512_VNNI")
)


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """The instructions that all contenders may use.

    Attributes:
        flags: of llama.cpp's build.
        environment: variables that limit PyTorch and Tessera to the same instructions.
    """

    flags: tuple[str, ...]
    environment: dict[str, str]


INSTRUCTION_SETS: Final = {
    "native": InstructionSet(("-DGGML_NATIVE=ON",), {}),
    "avx2": InstructionSet(
        (
            "-DGGML_NATIVE=OFF",
            *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")),
            *_AVX512,
        ),
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    ),
}


class BuildError(Exception):
    """llama.cpp cannot be downloaded or built; the text says why."""


@dataclass(frozen=True, slots=True)
class LlamaBuild:
    """A finished build.

    Attributes:
        folder: contains the programs.
        version: of the source package.
        flags: of CMake.
    """

    folder: Path
    version: str
    flags: tuple[str, ...]

    def program(self, name: str) -> str:
        """Return the path of a program of `TARGETS`."""
        return str(self.folder / name)


def flags_of(isa: str) -> tuple[str, ...]:
    """Return CMake's flags for a name of `INSTRUCTION_SETS`."""
    return (*_COMMON, *INSTRUCTION_SETS[isa].flags)


def build_folder(cache: Path, version: str, isa: str) -> Path:
    """Return the folder of a build. Its name depends on the version, the flags, and for native builds the processor."""
    words = [*flags_of(isa)]
    if "-DGGML_NATIVE=ON" in words:
        words.append(_processor())
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
    return cache / f"llama-{version}-{isa}-{digest}"


def build(isa: str, *, cache: Path = CACHE, version: str = VERSION, jobs: int = 2) -> LlamaBuild:
    """Build `TARGETS`, or return the build of an earlier call.

    Args:
        isa: a name of `INSTRUCTION_SETS`.
        cache: folder of downloads and builds.
        version: of llama-cpp-python.
        jobs: compilers that run at the same time.

    Raises:
        BuildError: a command failed, or a compiler is missing.
    """
    folder, flags = build_folder(cache, version, isa), flags_of(isa)
    done = folder / "built.json"
    made = {"version": version, "flags": flags, "targets": TARGETS}
    if not done.exists() or done.read_text() != json.dumps(made):
        if shutil.which("gcc") is None or shutil.which("g++") is None:
            raise BuildError("llama.cpp's build needs gcc and g++")
        sources = download(cache, version) / "vendor" / "llama.cpp"
        print(f"building llama.cpp ({version}, {isa}) in {folder}: about 10 minutes", flush=True)
        cmake, ninja = _tools(cache)
        configure = [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *flags]
        log = folder.with_name(f"{folder.name}.log")
        _run([*configure, "-S", str(sources), "-B", str(folder)], log)
        targets = [word for name in TARGETS for word in ("--target", name)]
        _run([cmake, "--build", str(folder), f"-j{jobs}", *targets], log)
        done.write_text(json.dumps(made))
    return LlamaBuild(folder / "bin", version, flags)


def download(cache: Path, version: str) -> Path:
    """Download and unpack the source package, and return its folder.

    Raises:
        BuildError: the download failed.
    """
    folder = cache / f"llama_cpp_python-{version}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    package = f"llama-cpp-python=={version}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=llama-cpp-python"]
    _run([*pip, f"--dest={cache}", package], cache / "download.log")
    with tarfile.open(cache / f"{folder.name}.tar.gz") as archive:
        archive.extractall(cache / "unpacked", filter="data")
    # Renamed only when it is complete.
    return (cache / "unpacked" / folder.name).rename(folder)


def _tools(cache: Path) -> tuple[str, str]:
    """Return the paths of CMake and Ninja; install those of PyPI if the system has none."""
    found = [shutil.which(name) for name in ("cmake", "ninja")]
    if found[0] and found[1]:
        return found[0], found[1]
    tools = cache / "tools"
    if not (tools / "bin" / "ninja").exists():
        venv.create(tools, with_pip=True)
        install = [str(tools / "bin" / "python"), "-m", "pip", "install", "cmake", "ninja"]
        _run(install, cache / "tools.log")
    return str(tools / "bin" / "cmake"), str(tools / "bin" / "ninja")


def _run(command: list[str], log: Path) -> None:
    """Run a command and append its output to a file.

    Raises:
        BuildError: the command failed; with the last lines of its output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        status = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if status:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise BuildError(f"{command[0]} failed with status {status}; {log} ends with\n{last}")


def _processor() -> str:
    """Return a text that is equal on processors with equal instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
