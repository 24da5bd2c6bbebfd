"""The two ways a layer attends: over the paged cache (serving), over the sequence (training).

Knows plans and caches; the kernels behind the door are none of its business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import decode_attention, flash_attention, prefill_attention, write_kv
from model.config import ModelConfig
from model.kv_cache import KVCache
from model.metadata import AttentionMetadata


class DenseAttention:
    """Causal attention among the tokens of the call; differentiable, keeps nothing."""

    def __init__(self, config: ModelConfig, softmax_scale: float) -> None:
        self._windows = [config.layer_window(layer) for layer in range(config.num_layers)]
        self._softmax_scale = softmax_scale

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend.

        Args:
            layer: index.
            q: [B, S, H, D].
            k: [B, S, K, D].
            v: [B, S, K, D].

        Returns:
            [B, S, H, D].
        """
        return flash_attention(q, k, v, self._softmax_scale, self._windows[layer])


class PagedAttention:
    """Attention of one step over the cache, which it first extends by the step's tokens."""

    def __init__(self, config: ModelConfig, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._layers, self._scales = kv_cache.layers, kv_cache.scales
        plans = (metadata.decode, metadata.prefill)
        sliding = (metadata.sliding_decode, metadata.sliding_prefill)
        self._plans = [
            sliding if config.mixes_attention and kind == "sliding_attention" else plans
            for kind in config.layer_types
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write keys and values to the cache, then attend.

        Args:
            layer: index.
            q: [T, H, D], rows as [decode rows | prefill rows].
            k: [T, K, D].
            v: [T, K, D].

        Returns:
            [T, H, D] contiguous.
        """
        kv, scale = self._layers[layer], self._scales[layer]
        write_kv(k, v, kv, self._metadata.slot_mapping, kv_scale=scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode, prefill = self._plans[layer]
        split = self._metadata.num_decode_tokens
        if decode is not None:
            decode_attention(q[:split], kv, decode, out[:split], kv_scale=scale)
        if prefill is not None:
            prefill_attention(q[split:], kv, prefill, out[split:], kv_scale=scale)
        return out
