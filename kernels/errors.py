"""The errors that the kernels raise for a caller's mistake.

They know shapes, dtypes and devices; nothing of the requests that led to them.
"""

from __future__ import annotations


class KernelError(Exception):
    """Root of the errors raised by this package."""


class ShapeError(KernelError, ValueError):
    """A shape, dtype, stride or length differs from what the function documents."""


class NoKernelError(KernelError):
    """No row of the registry accepts the problem; the message lists what each row refused."""
