"""The errors that this package raises for a caller's mistake or an unsupported device."""

from __future__ import annotations


class KernelError(Exception):
    """Base class of the errors that this package raises.

    Example:
        >>> try:
        ...     flash_attention(torch.zeros(4), torch.zeros(4), torch.zeros(4))
        ... except KernelError as error:
        ...     print(type(error).__name__)
        ShapeError
    """


class ShapeError(KernelError, ValueError):
    """A shape, dtype, stride or length differs from what the function documents."""


class NoKernelError(KernelError):
    """No row of the registry supports the problem; the message lists every row's reasons."""


class UnsupportedDeviceError(KernelError):
    """Neither the kernels nor their PyTorch replacements support the device."""
