"""Runs the tests of the build `avx_vnni` on a processor that has its instruction only in another encoding.

    python -m tests.kernels.cpu.evex [arguments of pytest]

AVX-VNNI is one instruction, `vpdpbusd`, in the encoding VEX, which processors with AVX512_VNNI have in the encoding
EVEX. Where a processor has the second alone, the build is compiled to assembly, each `{vex} vpdpbusd` is replaced by
`{evex} vpdpbusd`, and the tests run the library that is assembled from that; `--record-build` then enters it with
"encoding": "EVEX".

It proves the code of the build, as compiled: what is multiplied, in which registers and order. It does not prove the
encoding: neither that the assembler encodes the instruction in VEX as a processor decodes it, nor that a processor with
AVX-VNNI is found and runs the file that is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernels.cpu import library

NAME = "avx_vnni"
ENCODING = "EVEX"
_INSTALLED = library._FOLDER
_ROOT = Path(__file__).parents[3]
_NEEDED = frozenset({"avx2", "fma3", "f16c", "avx512_vl", "avx512_vnni"})


def unneeded(features: frozenset[str]) -> str | None:
    """Return why a processor with these features does not need this, or cannot run it; None if it should."""
    if "avx_vnni" in features:
        return "this processor has AVX-VNNI, so other runs test the build itself"
    if missing := _NEEDED - features:
        return f"this processor lacks {', '.join(sorted(missing))}"
    return None


def with_evex(assembly: str) -> str:
    """Return assembly in which `vpdpbusd` has the encoding EVEX."""
    changed = assembly.replace("{vex}\tvpdpbusd", "{evex}\tvpdpbusd")
    assert changed != assembly
    assert "{vex}" not in changed, "another instruction"
    return changed


def assemble(folder: Path) -> None:
    """Write the library to a folder, with copies of the installed ones that this processor runs."""
    # Not at the top, because pytest imports this module in environments without what builds need.
    from deploy.build_hook import builds, compile_library

    file, target, processor = next(
        it for it in builds("manylinux_2_28_x86_64") if it[0] == f"{NAME}.so"
    )
    source, assembly = _ROOT / "kernels/cpu/native/step.c", folder / f"{NAME}.s"
    quiet = "-Wno-unused-command-line-argument"  # half of them are of no use for each step
    compile_library(source, assembly, target, processor, "-S", quiet)
    assembly.write_text(with_evex(assembly.read_text()))
    compile_library(assembly, folder / file, target, f"{processor}+avx512vnni+avx512vl", quiet)
    shutil.copy(library._FOLDER / "avx2.so", folder)


def use(folder: Path) -> None:
    """Let this process load the library of a folder, as on a processor with AVX-VNNI and without AVX-512."""
    features = next(frozenset(it.features) for it in library.BUILDS if it.name == NAME)
    library._FOLDER, library.cpu_features = folder, lambda: features


def encoding() -> str | None:
    """Return the encoding in which this process runs a build, if it is not that of the installed file."""
    return None if library._FOLDER == _INSTALLED else ENCODING


def main() -> int:
    """Assemble the library and run the tests, unless it is not needed; return the exit status."""
    from deploy.build_hook import COMPILER

    if reason := unneeded(library.cpu_features()):
        print(f"{NAME} is not run with {ENCODING} encodings: {reason}")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        packages, folder = Path(temporary) / "packages", Path(temporary) / "lib"
        folder.mkdir()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", f"--target={packages}", COMPILER], check=True)
        own = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), own)))
        assemble(folder)
        tests = [sys.executable, "-m", "pytest", f"--evex-library={folder}", *sys.argv[1:]]
        return subprocess.run(tests, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
