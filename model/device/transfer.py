"""Copies a step's small arrays between the host and a device without blocking the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HostArray: TypeAlias = NDArray[Any]

# Triton compiles a kernel once for pointers that are multiples of 16 bytes and once more for other pointers.
_ALIGNMENT: Final = 16


def upload(arrays: Sequence[HostArray], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device in a single transfer.

    The transfer uses page-locked memory, so it is queued like a kernel. A copy from ordinary memory would block the
    host until the device has finished all queued work.

    Args:
        arrays: contiguous, of any shape, of dtypes that PyTorch supports.
        device: device to copy to.

    Returns:
        A tensor for each array, of the same shape and dtype. On a GPU they are views of one buffer; on a CPU they share
        the arrays' memory.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    host = torch.empty(_packed_size(arrays), dtype=torch.uint8, pin_memory=True)
    pack(arrays, host)
    # The host allocator reuses the buffer only after the copy.
    return unpack(arrays, host.to(device, non_blocking=True))


def pack(arrays: Sequence[HostArray], buffer: Tensor) -> None:
    """Write arrays one after the other, each at a multiple of 16 bytes.

    Args:
        arrays: as for `upload`.
        buffer: [bytes] uint8 on the host, large enough.
    """
    target = buffer.numpy()
    for array, start in zip(arrays, _offsets(arrays), strict=True):
        target[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)


def unpack(arrays: Sequence[HostArray], buffer: Tensor) -> list[Tensor]:
    """Return views of the arrays that `pack` wrote.

    Args:
        arrays: the arrays given to `pack`, for their shapes and dtypes.
        buffer: [bytes] uint8, the packed buffer or a copy of it on any device.

    Returns:
        Views of the buffer.
    """
    return [
        buffer[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for array, start in zip(arrays, _offsets(arrays), strict=True)
    ]


class StagedArrays:
    """Arrays of fixed shapes that are copied to a device repeatedly, each time in a single transfer.

    The host must call `wait` before it writes to them.

    Attributes:
        host: the arrays to write to, initially 0; page-locked for a GPU.
        device: a tensor for each array, of the same shape and dtype; on a CPU it shares memory with the array.
    """

    def __init__(
        self, shapes: Sequence[tuple[tuple[int, ...], type[np.generic]]], device: torch.device
    ) -> None:
        """Allocate the arrays.

        Args:
            shapes: shape and dtype of each array.
            device: device to copy to.
        """
        templates = [np.zeros(shape, dtype) for shape, dtype in shapes]
        on_gpu = device.type == "cuda"
        self._source = torch.zeros(_packed_size(templates), dtype=torch.uint8, pin_memory=on_gpu)
        # Filled on the device: a copy from the host could block.
        self._target = torch.zeros_like(self._source, device=device) if on_gpu else self._source
        self._sent: torch.cuda.Event | None = None
        self.host: list[HostArray] = [part.numpy() for part in unpack(templates, self._source)]
        self.device = unpack(templates, self._target)

    def wait(self) -> None:
        """Block until the last copy is complete, so that the host may write again."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """Queue the copy to the device."""
        if self._target is not self._source:
            self._target.copy_(self._source, non_blocking=True)
            self._sent = torch.cuda.current_stream(self._target.device).record_event()

    def to_bytes(self) -> bytes:
        """Return the contents of the host arrays."""
        return self._source.numpy().tobytes()

    def load(self, data: bytes) -> None:
        """Fill the host arrays with the contents of those of the same shapes."""
        self._source.numpy()[:] = np.frombuffer(data, np.uint8)


class Download:
    """A queued copy of a small tensor to the host. Reading it waits for the copy only, not for work queued later.

    Args:
        tensor: on any device; later changes to it do not affect the copy.
    """

    def __init__(self, tensor: Tensor) -> None:
        on_gpu = tensor.device.type == "cuda"
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        self._host.copy_(tensor, non_blocking=True)
        self._made = torch.cuda.current_stream(tensor.device).record_event() if on_gpu else None

    def read(self) -> Tensor:
        """Return the copy on the host, once it is complete."""
        if self._made is not None:
            self._made.synchronize()
        return self._host


def _offsets(arrays: Sequence[HostArray]) -> list[int]:
    sizes = (_aligned(array.nbytes) for array in arrays)
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def _packed_size(arrays: Sequence[HostArray]) -> int:
    return sum(_aligned(array.nbytes) for array in arrays)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
