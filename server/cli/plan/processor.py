"""The processor that `plan` and `size` are for. Imports PyTorch only to ask for that of this machine."""

from __future__ import annotations

from kernels.arch import GPUArch, detect, known_processors
from server.engine.core.start_checks import NO_GPU


class NoDeviceError(Exception):
    """The requested device is absent; the text names the flag for an absent one."""


def find_arch(key: str | None, device: str, name: str) -> GPUArch:
    """Return the processor that was asked for, or that of this machine.

    Args:
        key: of the catalogue, or a compute capability, for the first processor that has it; None for this machine's.
        device: the setting.
        name: of the flag that sets `key`, for the error.

    Raises:
        NoDeviceError: there is no GPU, but the setting asks for one.
    """
    if key is not None:
        return known_processors(key)[0]
    import torch  # noqa: PLC0415 - a named processor needs none

    if device == "cuda" and not torch.cuda.is_available():
        raise NoDeviceError(f"{NO_GPU}; use {name} to plan for a known GPU")
    return detect("cpu" if device == "cpu" else None)
