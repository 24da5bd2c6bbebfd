"""Selects and loads the C library for this processor.

`deploy/build_hook.py` compiles `native/step.c` once for each instruction set when the package is installed.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from pathlib import Path
from typing import Final, NamedTuple

import torch

from kernels.torch_private import cpu_features

VERSION: Final = 7
"""Of the C functions and structures; a library of another version is not loaded."""
_FOLDER: Final = Path(__file__).parent / "lib"


class Build(NamedTuple):
    """One compiled library.

    Attributes:
        name: of the file, without its suffix.
        machine: as `platform.machine`, in lower case.
        features: what the processor must have, as `torch.cpu.get_capabilities` names it.
        capability: the least `torch.backends.cpu.get_cpu_capability`, which users can lower; "" for any.
    """

    name: str
    machine: str
    features: tuple[str, ...]
    capability: str = ""


BUILDS: Final = (
    Build(
        "avx512_vnni",
        "x86_64",
        ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_cd", "avx512_vnni"),
        "AVX512",
    ),
    Build("avx_vnni", "x86_64", ("avx2", "fma3", "f16c", "avx_vnni"), "AVX2"),
    Build("avx2", "x86_64", ("avx2", "fma3", "f16c"), "AVX2"),
    Build("neon", "arm64", ("neon_dotprod",)),
)
"""Most preferred first."""
_MACHINES: Final = {"amd64": "x86_64", "aarch64": "arm64"}
_ORDER: Final = ("DEFAULT", "AVX2", "AVX512")


def choose(machine: str, features: frozenset[str], capability: str) -> Build | None:
    """Return the first build that a processor can run; None if there is none.

    Args:
        machine: as `platform.machine`.
        features: what the processor has.
        capability: as `torch.backends.cpu.get_cpu_capability`.
    """
    machine = _MACHINES.get(machine.lower(), machine.lower())
    for build in BUILDS:
        lowered = (
            build.capability
            and capability in _ORDER
            and _ORDER.index(capability) < _ORDER.index(build.capability)
        )
        if build.machine == machine and not lowered and features.issuperset(build.features):
            return build
    return None


@functools.cache
def load() -> ctypes.CDLL | str:
    """Load the library for this processor; returns why there is none otherwise."""
    build = choose(platform.machine(), cpu_features(), torch.backends.cpu.get_cpu_capability())
    if build is None:
        return f"this {platform.machine()} processor lacks the instructions of every build"
    path = _FOLDER / (build.name + (".dylib" if sys.platform == "darwin" else ".so"))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the CPU library cannot be loaded, install the package again: {error}"
    library.tessera_version.restype = ctypes.c_int64
    if (found := library.tessera_version()) != VERSION:
        return f"{path.name} has version {found} instead of {VERSION}, install the package again"
    library.tessera_instructions.restype = ctypes.c_char_p
    library.tessera_start.restype = ctypes.c_void_p
    for name in ("tessera_weight_bytes", "tessera_scale_bytes", "tessera_step", "tessera_logits"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def instructions() -> str:
    """Return the instruction set of the loaded library, for plans and logs."""
    library = load()
    assert not isinstance(library, str), library
    name: bytes = library.tessera_instructions()
    return name.decode()
