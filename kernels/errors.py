"""The errors that this package raises for a caller's mistake or an unsupported device."""

from __future__ import annotations


class KernelError(Exception):
    """Root of the errors raised by this package."""


class ShapeError(KernelError, ValueError):
    """A shape, dtype, stride or length differs from what the function documents."""


class NoKernelError(KernelError):
    """No row of the registry supports the problem; the message lists every row's reasons."""


class UnsupportedDeviceError(KernelError):
    """The device is not one that the kernels, or PyTorch in their place, are written for."""
