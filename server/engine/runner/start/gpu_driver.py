"""Opens the GPU while PyTorch is imported, which saves a few tenths of a second at start-up.

Errors of the driver are ignored here, because PyTorch detects and reports them later.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger("tessera.engine")


def open_gpu() -> None:
    """Create the primary context of the first GPU. PyTorch uses it later; it exists until the process ends."""
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
    log.debug("opening the GPU through the CUDA driver returned status %d", status)
