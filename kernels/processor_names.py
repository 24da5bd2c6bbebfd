"""Reads the names of GPUs as people, drivers and shops write them. Imports no PyTorch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from kernels.arch import PROCESSORS, GPUArch

ALIASES: Final = {
    "a100": ("a100-sxm", "a100-sxm4"),
    "a100-40gb": ("a100-sxm4-40gb", "a100-pcie-40gb"),
    "a100-pcie": ("a100-pcie-80gb", "a100-80gb-pcie"),
    "rtxa6000": ("a6000",),
    "rtxa5000": ("a5000",),
    "rtxa4000": ("a4000",),
    "rtx6000ada": ("6000ada", "rtx-6000-ada", "l6000ada"),
    "h100": ("h100-sxm", "h100-sxm5"),
    "h100-pcie": ("h100-80gb-pcie",),
    "gh200": ("gh200-96gb", "grace-hopper"),
    "b200": ("b200-sxm", "b200-sxm6"),
    "b300": ("b300-sxm", "b300-sxm6", "b300-sxm6-ac"),
    "gb200": ("grace-blackwell",),
    "rtxpro6000": (
        "pro6000", "rtx-pro-6000-blackwell-workstation-edition", "rtx-pro-6000-blackwell-server-edition",
    ),
    "sm_75": ("turing",),
    "sm_80": ("ampere",),
    "sm_89": ("ada", "lovelace", "ada-lovelace"),
    "sm_90": ("hopper",),
    "sm_100": ("blackwell",),
}  # fmt: skip
"""Names of the processors of `PROCESSORS`, and of compute capabilities, beside their keys and vendor's names."""

_OLD: Final = "is older than sm_75 (T4), the oldest that PyTorch and the kernels support"
_AMD: Final = "is an AMD GPU; the kernels are for NVIDIA GPUs and for CPUs"
_OTHER: Final = "is no NVIDIA GPU; the kernels are for NVIDIA GPUs and for CPUs"
_SHARED_MEMORY: Final = (
    "shares its host's memory and has no known peaks; plan on the machine itself, without a name"
)
_REFUSED: Final = (
    (r"(sm|compute)?([2356]\d|7[0-4])", _OLD),
    (r"(v100|v100sxm\d|v100pcie|titanv|quadrogv100|volta)", _OLD),
    (r"([pk](4|6|20|40|80|100)|m(10|40|60)|gtx(?!16)\d+(ti)?|titan(x|xp)?|pascal|maxwell|kepler)", _OLD),
    (r"(mi\d{2,3}[axp]?|instinct.*|radeon.*|rx\d+.*|w7900|7900xtx?|gfx\d+[a-z]?|rocm|cdna\d?|rdna\d?)", _AMD),
    (r"(gaudi\d?|hpu|intel.*|xpu|arc.*|tpu.*|trainium\d?|inferentia\d?|m[1-4](pro|max|ultra)?|mps|metal)", _OTHER),
    (r"(orin.*|agxorin|jetson.*|thor|gb10|dgxspark|spark)", _SHARED_MEMORY),
)  # fmt: skip
_CAPABILITY: Final = re.compile(r"(?:sm|compute|cc|computecapability)?(\d{1,2})\.?(\d)[af]?")
_NOISE: Final = re.compile(r"\b(?:nvidia|geforce|tesla|quadro|amd|generation|gpu)\b")
_MEMORY: Final = re.compile(r"\d+gb")
_ABOUT: Final = 0.15
"""Share by which the memory of a name, in GB, may differ from what the driver reports."""


class UnknownProcessorError(ValueError):
    """A name is that of no known processor, or of one that is not supported; the text says which and why."""


def read(name: str, allowed: Collection[str] = ()) -> str:
    """Return the key or the compute capability that a name stands for.

    Args:
        name: such as "h100", "RTX 4090", "4090", "NVIDIA H100 80GB HBM3", "sm_90a", "9.0" or "hopper", in any case.
        allowed: keys that the caller takes; empty for all of `PROCESSORS`.

    Returns:
        A key of `PROCESSORS`, or a compute capability such as "sm_90" of one of them.

    Raises:
        UnknownProcessorError: there is no such processor, or it is not supported.
    """
    candidates = list(_candidates(name))
    found = next((_NAMES[it] for it in candidates if it in _NAMES), None)
    if found is not None and (not allowed or found in allowed or found not in PROCESSORS):
        return found
    for pattern, why in _REFUSED:
        if any(re.fullmatch(pattern, it) for it in candidates):
            raise UnknownProcessorError(f"{name} {why}")
    known = ", ".join((*(allowed or PROCESSORS), *CAPABILITIES))
    raise UnknownProcessorError(f"{name!r} is none of {known}")


def _candidates(name: str) -> Iterator[str]:
    """Yield what may be in `_NAMES` for a name: all of it, then without its memory if that is what the GPU has."""
    plain = _plain(name)
    yield plain
    if capability := _CAPABILITY.fullmatch(plain):
        yield f"sm{capability[1]}{capability[2]}"
    words = _words(name)
    gigabytes = [int(it.removesuffix("gb")) for it in words if _MEMORY.fullmatch(it)]
    without_memory = [it for it in words if not _MEMORY.fullmatch(it) and not it.startswith("hbm")]
    for rest in (without_memory, [it for it in without_memory if not it.startswith("sxm")]):
        arch = PROCESSORS.get(_NAMES.get("".join(rest), ""))
        if arch is None or all(_has_about(arch, it) for it in gigabytes):
            yield "".join(rest)


def _has_about(arch: GPUArch, gigabytes: int) -> bool:
    return abs(arch.memory_mib / 1024 - gigabytes) <= _ABOUT * gigabytes


def _plain(name: str) -> str:
    """Return a name in lower case without the words of a vendor and without separators but the dots of numbers."""
    return "".join(_words(name))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9.]+", _NOISE.sub(" ", name.lower()))


def _sms() -> list[int]:
    return sorted({arch.sm for arch in PROCESSORS.values() if not arch.is_cpu})


CAPABILITIES: Final = tuple(f"sm_{sm}" for sm in _sms())
"""The compute capabilities of the processors in `PROCESSORS`."""


def _names() -> Iterator[tuple[str, str]]:
    for capability in CAPABILITIES:
        yield _plain(capability), capability
    for key, arch in PROCESSORS.items():
        for name in (key, arch.name, *ALIASES.get(key, ())):
            yield _plain(name), key
            if re.fullmatch(r"rtx(pro)?\d.*", _plain(name)):
                yield _plain(name).removeprefix("rtx"), key
    for capability in CAPABILITIES:
        for name in ALIASES.get(capability, ()):
            yield _plain(name), capability


_NAMES: Final = dict(_names())
