"""Looks for an NVIDIA GPU without PyTorch, whose import takes seconds."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

# NVIDIA's driver, Windows' for WSL, NVIDIA's for Jetson modules, and AMD's: PyTorch for ROCm has `cuda` devices too.
_NODES = ("nvidia*", "dxg", "nvhost*", "nvmap", "kfd")
_LIBRARY = "libcuda.so.1"


def may_have_gpu(devices: Path = Path("/dev"), library: str = _LIBRARY) -> bool:
    """Whether PyTorch could find a GPU; false only if it certainly cannot.

    A GPU needs the node of a device, and the driver's library, which PyTorch loads too. Both must be missing for the
    answer to be false, so that an unusual installation is not refused.

    Args:
        devices: folder of the nodes.
        library: name of the driver's library.
    """
    if sys.platform != "linux" or any(any(devices.glob(pattern)) for pattern in _NODES):
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
