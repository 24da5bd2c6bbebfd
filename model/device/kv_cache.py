"""The KV cache: device memory for what all sequences keep from step to step, by the mixers of the network.

The engine decides which blocks and which slot a sequence uses. Only kernels write to them.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import FP8
from model.network.state import Paged, Shared, StateSpec, fixed_of, paged_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class KVCache:
    """The keys and values of layers with attention, in blocks; the states of recurrent mixers, in slots.

    Keys and values of a layer are one contiguous tensor [2, N, S, K, D]: index 0 holds keys, index 1 values. A float8
    cache has a second tensor per layer, [2, N, K, S] float32, with a scale for each key and each value of a head. It is
    separate so that the scales of a head's tokens are adjacent in memory. Each layer is a separate allocation, so that
    the cache needs no single contiguous range of memory.

    A slot has the arrays of one sequence of all layers with a state of fixed size. They are adjacent, so that a slot
    is copied at once; an array of a layer is a view [slots, *shape], contiguous but for its first dimension.

    Args:
        spec: what the layers keep.
        num_blocks: N.
        block_size: S.
        device: of the memory.
        num_slots: of the cache; without effect if no layer has a state of fixed size.

    Attributes:
        spec: see above.
        num_blocks: see above.
        block_size: see above.
        num_slots: see above; 0 if no layer has a state of fixed size.
        dtype: of keys and values.
        kv_dtype: its name if it has scales, else None.
        device: see above.
        layers: every layer's keys and values; without elements for a layer that has none. A layer that reads those of
            an earlier layer has the same tensor.
        scales: every layer's scales, likewise; None if there are none.
        fixed: every layer's arrays of fixed size; none for a layer with keys and values alone.
    """

    def __init__(
        self,
        spec: StateSpec,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        num_slots: int = 0,
    ) -> None:
        self.spec, self.num_blocks, self.block_size = spec, num_blocks, block_size
        self.num_slots = num_slots if spec.slot_bytes else 0
        device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.kv_dtype = FP8 if spec.dtype == FP8 else None
        layers: list[Tensor] = []
        scales: list[Tensor | None] = []
        for it in spec.layers:
            if isinstance(it, Shared):
                layers.append(layers[it.layer])
                scales.append(scales[it.layer])
            else:
                layers.append(self._keys_and_values(paged_of(it), device))
                scales.append(self._scales(paged_of(it), device))
        self.layers, self.scales = tuple(layers), tuple(scales)
        self.device = self.layers[0].device
        self._slots = _zeros((self.num_slots, spec.slot_bytes), torch.uint8, device)
        self.fixed = tuple(self._arrays())

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers."""
        blocks = self.num_blocks * self.block_size * self.spec.token_bytes
        return blocks + self.num_slots * self.spec.slot_bytes

    def _keys_and_values(self, it: Paged | None, device: torch.device) -> Tensor:
        if it is None:
            return torch.empty(0, dtype=self.dtype, device=device)
        shape = (2, self.num_blocks, self.block_size, it.num_kv_heads, it.head_dim)
        return _zeros(shape, getattr(torch, it.dtype), device)

    def _scales(self, it: Paged | None, device: torch.device) -> Tensor | None:
        if it is None or it.scale_dtype is None:
            return None
        shape = (2, self.num_blocks, it.num_kv_heads, self.block_size)
        return _zeros(shape, getattr(torch, it.scale_dtype), device)

    def _arrays(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the arrays of each layer, views of the slots."""
        end = 0
        for it in map(fixed_of, self.spec.layers):
            if it is None:
                yield ()
                continue
            first, end = end, end + it.offsets[-1]
            parts = zip(it.offsets, it.num_bytes, it.dtypes, it.shapes, strict=False)
            yield tuple(
                self._slots[:, first + offset : first + offset + size]
                .view(getattr(torch, dtype))
                .view(self.num_slots, *shape)
                for offset, size, dtype, shape in parts
            )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros: uninitialized memory is unsafe, because a CUDA graph with padding rows may read any block.

    On a CPU the operating system provides zeroed pages at their first use. `torch.zeros` would touch them all, which
    took 0.4 s for 800 MiB at startup and held memory that few requests ever need.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
