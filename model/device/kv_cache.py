"""The KV cache: device memory for the keys and values of all sequences.

It consists of blocks per layer; the engine decides which blocks a sequence uses.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from kernels import FP8

_SCALE_DTYPE = torch.float32


class KVCache:
    """One contiguous tensor per layer, [2, N, S, K, D]: index 0 holds keys, index 1 values.

    A float8 cache has a second tensor per layer, [2, N, K, S] float32, with a scale for each key and each value of a
    head. It is separate so that the scales of a head's tokens are adjacent in memory.

    Each layer is a separate allocation, so that the cache needs no single contiguous range of memory. Only kernels
    write to it.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
        device = torch.device(device)
        self.dtype = dtype
        self.kv_dtype = FP8 if is_quantized(dtype) else None
        self._layers = tuple(_zeros(shape, dtype, device) for _ in range(num_layers))
        scales = (2, num_blocks, num_kv_heads, block_size)
        self._scales = tuple(
            _zeros(scales, _SCALE_DTYPE, device) if is_quantized(dtype) else None
            for _ in range(num_layers)
        )
        self.bytes_per_token = bytes_per_token(num_layers, num_kv_heads, head_dim, dtype)

    def layer(self, index: int) -> Tensor:
        """Return the cache of layer `index`: [2, N, S, K, D], contiguous."""
        return self._layers[index]

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """Every layer's cache, in order."""
        return self._layers

    @property
    def scales(self) -> tuple[Tensor | None, ...]:
        """Every layer's scales, [2, N, K, S] float32 contiguous; None if the dtype needs none."""
        return self._scales

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers."""
        return self.num_blocks * self.block_size * self.bytes_per_token


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros: uninitialized memory is unsafe, because a CUDA graph with padding rows may read any block.

    On a CPU the operating system provides zeroed pages at their first use. `torch.zeros` would touch them all, which
    took 0.4 s for 800 MiB at startup and held memory that few requests ever need.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype has scales."""
    return dtype is torch.float8_e4m3fn


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes that one token occupies across all layers, including scales."""
    scale = _SCALE_DTYPE.itemsize if is_quantized(dtype) else 0
    return 2 * num_layers * num_kv_heads * (head_dim * dtype.itemsize + scale)
