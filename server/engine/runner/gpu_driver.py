"""Has the driver open the GPU while PyTorch is imported, which takes it a few tenths of a second of waiting.

Knows the driver alone: what it refuses is PyTorch's to find out and to tell.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger("tessera.engine")


def open_gpu() -> None:
    """Make the context of the first GPU, which PyTorch then finds and which lives as long as the process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    status = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    )
    log.debug("the driver opened the GPU with status %d", status)
