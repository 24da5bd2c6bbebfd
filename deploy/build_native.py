"""Compiles the C library of `kernels/cpu` when the package is built or installed.

It is a build hook of hatchling. The compiler is Zig's C compiler, which pip downloads as a package for the time of the
build, so that users need none and everybody gets the same code. docs/decisions/0029-cpu-library.md has the reasons.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILER = "ziglang==0.15.2"
_FLAGS = (
    "-std=c11", "-O3", "-g0", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-sanitize=all",
    "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-lpthread",
)  # fmt: skip
_X86 = {
    "avx512_vnni": "x86_64_v4+avx512vnni",
    "avx_vnni": "x86_64_v3+avxvnni",
    "avx2": "x86_64_v3",
}
_ARM = {"neon": "generic+dotprod"}
# The oldest C library that any supported version of PyTorch runs with.
_TARGETS = {
    ("linux", "x86_64"): ("x86_64-linux-gnu.2.28", _X86),
    ("linux", "aarch64"): ("aarch64-linux-gnu.2.28", _ARM),
    ("darwin", "arm64"): ("aarch64-macos", {"neon": "apple_m1"}),
    ("darwin", "x86_64"): ("x86_64-macos", {"avx2": "x86_64_v3"}),
}


def builds(system: str, machine: str) -> list[tuple[str, str, str]]:
    """Return (file name, target, processor) of the libraries for a platform; none for one without a library."""
    target, processors = _TARGETS.get((system, machine.lower()), ("", {}))
    suffix = ".dylib" if system == "darwin" else ".so"
    return [(name + suffix, target, processor) for name, processor in processors.items()]


def compile_library(source: Path, output: Path, target: str, processor: str) -> None:
    """Compile one library.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its messages are on stderr.
    """
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "ziglang", "cc", "-target", target, f"-mcpu={processor}"]
        subprocess.run(  # noqa: S603 - no shell, and no argument comes from outside
            [*command, *_FLAGS, str(source), "-o", str(output)],
            check=True,
            env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
        )


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds the compiled libraries to a wheel or an editable installation."""

    def dependencies(self) -> list[str]:
        """Return what pip installs for the build."""
        return [COMPILER] if builds(sys.platform, platform.machine()) else []

    def initialize(self, _version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries of this platform."""
        root = Path(self.root) / "kernels" / "cpu"
        folder = root / "lib"
        folder.mkdir(exist_ok=True)
        found = builds(sys.platform, platform.machine())

        def compile_one(build: tuple[str, str, str]) -> None:
            name, target, processor = build
            compile_library(root / "native" / "step.c", folder / name, target, processor)

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_one, found))
        if found:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["artifacts"] += [f"kernels/cpu/lib/{name}" for name, _, _ in found]
