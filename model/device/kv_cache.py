"""The memory that keys and values of all sequences live in.

Knows blocks and layers; which block belongs to which sequence is the engine's business.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from kernels import FP8

_SCALE_DTYPE = torch.float32


class KVCache:
    """One tensor per layer, [2, N, S, K, D]: index 0 keys, 1 values; contiguous.

    In float8 a second one per layer, [2, N, K, S] float32, has a scale for each key and each value of a
    head. It lies apart so that the scales of a head's tokens are neighbours.

    Layers are separate allocations, so that no single tensor needs the whole cache's contiguous
    range. Only the kernels write to it.
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
        self.kv_dtype = FP8 if is_quantised(dtype) else None
        self._layers = tuple(_zeros(shape, dtype, device) for _ in range(num_layers))
        scales = (2, num_blocks, num_kv_heads, block_size)
        self._scales = tuple(
            _zeros(scales, _SCALE_DTYPE, device) if is_quantised(dtype) else None
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
        """Every layer's scales, [2, N, K, S] float32 contiguous; None where the dtype needs none."""
        return self._scales

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers."""
        return self.num_blocks * self.block_size * self.bytes_per_token


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not uninitialised memory: a graph captured over padding rows may read any block.

    On a CPU the pages come from the operating system at their first use: `torch.zeros` would touch
    them all, which took 0.4 s for 800 MiB at start-up and held memory that few requests ever need.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype has scales."""
    return dtype is torch.float8_e4m3fn


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Compute the bytes one token occupies across all layers, scales included."""
    scale = _SCALE_DTYPE.itemsize if is_quantised(dtype) else 0
    return 2 * num_layers * num_kv_heads * (head_dim * dtype.itemsize + scale)
