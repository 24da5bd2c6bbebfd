"""The two ways a layer attends: over the paged cache (serving), over the sequence (training).

Knows plans and caches; the kernels behind the door are none of its business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import decode_attention, flash_attention, prefill_attention, write_kv
from kernels.linear.projection import CacheSlots, FusedNorm, rope_and_write_kv
from model.checkpoint.config import ModelConfig
from model.device.kv_cache import KVCache
from model.network.metadata import AttentionMetadata


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
        return self.attend(layer, q)

    @property
    def most_bytes(self) -> int:
        """Bytes of keys and values that a layer reads at most."""
        kv = self._layers[0]
        return self._metadata.most_keys * 2 * kv.shape[3] * kv.shape[4] * kv.dtype.itemsize

    def attend_projected(
        self,
        layer: int,
        qkv: Tensor,
        positions: Tensor,
        rope: tuple[Tensor, Tensor],
        norms: tuple[FusedNorm, FusedNorm] | None,
        ahead: tuple[Tensor, Tensor] | None,
        *,
        pdl: bool,
    ) -> Tensor:
        """Make queries of a projection, write its keys and values to the cache, and attend; on a GPU.

        Args:
            layer: index.
            qkv: [T, (H + 2 * K) * D] contiguous, rows as above; is overwritten.
            positions: [T] int64.
            rope: as `RotaryEmbedding.tables`.
            norms: of queries and keys; None where the family has none.
            ahead: weights that the GPU's cache should fetch meanwhile.
            pdl: launch before the kernel before has ended.

        Returns:
            [T, H, D] contiguous.
        """
        slots = self._metadata.slot_mapping
        cache = CacheSlots(self._layers[layer], slots, self._scales[layer])
        q = rope_and_write_kv(qkv, cache, rope, positions, norms=norms, ahead=ahead, pdl=pdl)
        return self.attend(layer, q)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attend to a cache that holds the step's keys and values already.

        Args:
            layer: index.
            q: [T, H, D], as above.

        Returns:
            [T, H, D] contiguous.
        """
        kv, scale = self._layers[layer], self._scales[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode, prefill = self._plans[layer]
        split = self._metadata.num_decode_tokens
        if decode is not None:
            decode_attention(q[:split], kv, decode, out[:split], kv_scale=scale)
        if prefill is not None:
            prefill_attention(q[split:], kv, prefill, out[split:], kv_scale=scale)
        return out
