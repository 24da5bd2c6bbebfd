"""Runs code for a GPU that the host does not have, to compile its kernels.

Inside `absent_gpu`, tensors on "cuda" have shapes, dtypes and strides but no data, and launches of Triton kernels only
compile. Together with `kernels.gpu.compile_ahead` this fills Triton's cache with the kernels that the same code
launches on the real GPU: Triton's cache key has the compute capability, the kernel's source, its constants and the
types and alignments of its arguments, and all of them are the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.arch import GPUArch, described_as
from kernels.torch_private import without_torch_function

_DEVICE: Final = torch.device("cuda", 0)
_READS: Final = frozenset({Tensor.cpu, Tensor.item, Tensor.numpy, Tensor.tolist})


class AbsentGPUError(Exception):
    """The kernels of an absent GPU cannot be compiled here; the text says what is missing."""


@contextlib.contextmanager
def absent_gpu(arch: GPUArch) -> Iterator[torch.device]:
    """Pretend that the host has a GPU, without its memory and without computing anything.

    Tensors that are created on the device or copied to it have no data; reading one on the host gives zeros. Only one
    thread may use it at a time, in a process that uses no real GPU.

    Yields:
        The device.

    Raises:
        AbsentGPUError: Triton or a C compiler is missing.
    """
    try:
        from triton.runtime.driver import driver  # noqa: PLC0415 - not everywhere
        from triton.runtime.jit import JITFunction  # noqa: PLC0415 - as above
    except ImportError:
        raise AbsentGPUError("Triton is not installed: pip install triton==3.6.0") from None
    launch = JITFunction.run

    def compile_only(function: object, *arguments: object, **options: object) -> object:
        return launch(function, *arguments, **options | {"warmup": True})

    with (
        described_as(arch),
        _driver_library(),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(driver, "_active", _driver(arch)),
        mock.patch.object(torch.cuda, "current_stream", _Stream),
        torch.no_grad(),
        _AbsentTensors(),
    ):
        yield _DEVICE


class _AbsentTensor(Tensor):
    """A tensor without data that looks like one on the GPU. PyTorch sees a tensor on its device "meta"."""

    __torch_function__ = without_torch_function  # type: ignore[assignment]  # as PyTorch documents

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a plain attribute in torch's stub
        return _DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]  # as above
        return True

    def data_ptr(self) -> int:
        """Return an address with the alignment of the real tensor's: allocations begin at multiples of 512 bytes."""
        return int(self.storage_offset()) * self.element_size()


class _AbsentTensors(TorchFunctionMode):
    """Redirects PyTorch's functions from the GPU to the device "meta"."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is torch.device:
            return func(*args, **kwargs or {})
        reads = func in _READS or _copies_to_host(func, args)
        plain = _zeros if reads else _meta
        positional = [_map(plain, value) for value in args]
        named = {key: _map(plain, value) for key, value in (kwargs or {}).items()}
        named.pop("pin_memory", None)
        result = func(*positional, **named)
        for given, passed in zip(args, positional, strict=True):
            if result is passed:  # an operator in place
                return given
        return _map(_absent, result)


def _copies_to_host(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    if func is Tensor.copy_:
        return not isinstance(args[0], _AbsentTensor)
    return func is Tensor.to and any(str(value) == "cpu" for value in args[1:])


def _map(change: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401 - an argument of any function
    return type(value)(map(change, value)) if type(value) in (list, tuple) else change(value)


def _meta(value: Any) -> Any:  # noqa: ANN401 - as above
    if isinstance(value, _AbsentTensor):
        return value.as_subclass(Tensor)
    is_device = isinstance(value, torch.device | str) and str(value).startswith("cuda")
    return torch.device("meta") if is_device else value


def _zeros(value: Any) -> Any:  # noqa: ANN401 - as above
    if isinstance(value, _AbsentTensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    return value


def _absent(value: Any) -> Any:  # noqa: ANN401 - as above
    is_new = isinstance(value, Tensor) and value.is_meta and not isinstance(value, _AbsentTensor)
    return value.as_subclass(_AbsentTensor) if is_new else value


class _Stream:
    """A stream on which everything is complete, and its events."""

    def __init__(self, device: object = None) -> None:
        """Ignore the device."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        """Return at once."""


def _driver(arch: GPUArch) -> object:
    """Return Triton's driver for a GPU that is not there."""
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - not everywhere
    from triton.backends.nvidia.driver import CudaDriver  # noqa: PLC0415 - as above

    driver = CudaDriver()
    driver.get_current_target = lambda: GPUTarget("cuda", arch.sm, 32)
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda _device=None: 0
    return driver


@contextlib.contextmanager
def _driver_library() -> Iterator[None]:
    """Provide an empty libcuda.so.1 where the NVIDIA driver is missing.

    The C programs that launch kernels are linked with it. They find the real library where they are used.
    """
    from triton import knobs  # noqa: PLC0415 - not everywhere

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        yield
        return
    before = sys.getdlopenflags()
    with tempfile.TemporaryDirectory() as folder, knobs.nvidia.scope():
        ctypes.CDLL(_build_empty_library(Path(folder)), mode=ctypes.RTLD_GLOBAL)
        knobs.nvidia.libcuda_path = folder
        sys.setdlopenflags(os.RTLD_LAZY)  # the library has none of the functions
        try:
            yield
        finally:
            sys.setdlopenflags(before)


def _build_empty_library(folder: Path) -> str:
    from triton.runtime.build import _build  # noqa: PLC0415 - not everywhere

    source, name = folder / "empty.c", "libcuda.so.1"
    source.touch()
    try:
        built = _build("empty", str(source), folder, [], [], [], [f"-Wl,-soname,{name}"])
    except (RuntimeError, subprocess.CalledProcessError) as error:
        raise AbsentGPUError(f"the C compiler does not work: {error}") from None
    return str(Path(built).rename(folder / name))
