"""Looks for an NVIDIA GPU and its driver without PyTorch, whose import takes seconds and which hides an old driver."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import NamedTuple

# NVIDIA's driver, Windows' for WSL, NVIDIA's for Jetson modules; and AMD's: PyTorch for ROCm has `cuda` devices too.
_NVIDIA_NODES = ("nvidia*", "dxg", "nvhost*", "nvmap")
_NODES = (*_NVIDIA_NODES, "kfd")
_DEVICES = Path("/dev")
_LIBRARY = "libcuda.so.1"
_VERSION_FILE = Path("/proc/driver/nvidia/version")


class Driver(NamedTuple):
    """NVIDIA's driver.

    Attributes:
        has_device: whether there is the node of a device.
        cuda: latest version of CUDA that it supports, as (major, minor); None if its library is absent.
        version: of the driver, such as "580.65.06"; None if it is not known.
    """

    has_device: bool
    cuda: tuple[int, int] | None = None
    version: str | None = None


def read_driver(
    devices: Path = _DEVICES, library: str = _LIBRARY, version_file: Path = _VERSION_FILE
) -> Driver:
    """Describe the driver of this machine.

    Args:
        devices: folder of the nodes.
        library: name of the driver's library.
        version_file: has the version of the kernel module.
    """
    try:
        text = version_file.read_text()
    except OSError:
        text = ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return Driver(_has_node(devices, _NVIDIA_NODES), _supported_cuda(library), found and found[0])


def _supported_cuda(library: str) -> tuple[int, int] | None:
    """Ask the driver which version of CUDA it supports."""
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    # 1000 * major + 10 * minor. Source: CUDA Driver API, "Version Management".
    return None if status or not number.value else (number.value // 1000, number.value % 1000 // 10)


def count_gpus(library: str = _LIBRARY) -> int:
    """Return how many NVIDIA GPUs a process can use, of those that CUDA_VISIBLE_DEVICES allows; 0 without a driver.

    It initializes the driver in this process, but uses no memory of a GPU.
    """
    number = ctypes.c_int()
    try:
        driver = ctypes.CDLL(library)
        status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number))
    except (OSError, AttributeError):
        return 0
    return 0 if status else number.value


def may_have_gpu(devices: Path = _DEVICES, library: str = _LIBRARY) -> bool:
    """Whether PyTorch could find a GPU; false only if it certainly cannot.

    A GPU needs the node of a device, and the driver's library, which PyTorch loads too. Both must be missing for the
    answer to be false, so that an unusual installation is not refused.
    """
    if sys.platform != "linux" or _has_node(devices, _NODES):
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _has_node(devices: Path, patterns: tuple[str, ...]) -> bool:
    return any(any(devices.glob(pattern)) for pattern in patterns)
