"""The two ways a layer attends: over the paged cache (serving), over the sequence (training)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kernels import (
    apply_rope,
    decode_attention,
    flash_attention,
    prefill_attention,
    rms_norm,
    write_kv,
)
from kernels.rope.cache import CacheSlots, rope_and_write_kv

if TYPE_CHECKING:
    from torch import Tensor

    from model.checkpoint.config import ModelConfig
    from model.device.kv_cache import KVCache
    from model.network.layers import BoundLayer
    from model.network.metadata import AttentionMetadata
    from model.network.rope import RotaryEmbedding

_LITTLE_BYTES: Final = 16 << 20
"""Keys and values of a layer up to which weights that are fetched before them are still in the cache behind them."""
_FEW_ROWS: Final = 64
"""Tokens up to which a step is bound by its weights; with more they are not what it waits for."""


class DenseAttention:
    """Causal attention among the tokens of the call; differentiable, keeps nothing.

    Args:
        config: of the model.
        softmax_scale: factor on the scores.
        rope: cos and sin as `kernels.apply_rope` takes them.
    """

    def __init__(
        self, config: ModelConfig, softmax_scale: float, rope: tuple[Tensor, Tensor]
    ) -> None:
        self._config, self._softmax_scale, self._rope = config, softmax_scale, rope

    def __call__(self, index: int, layer: BoundLayer, qkv: Tensor) -> Tensor:
        """Attend: [B, L, (H + 2 * K) * D] to [B, L, H * D], for sequences of L tokens."""
        q, k, v = split_heads(self._config, layer, qkv, self._rope)
        window = self._config.layer_window(index)
        return flash_attention(q, k, v, self._softmax_scale, window).flatten(-2)


class PagedAttention:
    """Attention of one step over the cache, which it first extends by the step's tokens.

    Args:
        config: of the model.
        kv_cache: extended by the step.
        metadata: of the step.
        rope: reserved for the step's positions.
        positions: [T] int64.
        fused: whether norms per head, rotation and the cache write are one launch of ours, else PyTorch's.
        pdl: whether that launch may begin before the kernel before has ended.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rope: RotaryEmbedding,
        positions: Tensor,
        *,
        fused: bool,
        pdl: bool,
    ) -> None:
        self._config, self._metadata, self._positions = config, metadata, positions
        self._layers, self._scales = kv_cache.layers, kv_cache.scales
        plans = (metadata.decode, metadata.prefill)
        sliding = (metadata.sliding_decode, metadata.sliding_prefill)
        self._plans = [
            sliding if config.mixes_attention and kind == "sliding_attention" else plans
            for kind in config.layer_types
        ]
        self._fused, self._pdl = fused, pdl
        self._rope = rope.tables if fused else rope.table(positions)
        self._prefetches = (
            pdl and len(positions) <= _FEW_ROWS and self._most_bytes() <= _LITTLE_BYTES
        )

    def __call__(self, index: int, layer: BoundLayer, qkv: Tensor) -> Tensor:
        """Write keys and values to the cache, then attend.

        Args:
            index: of the layer.
            layer: its norms, and the weights behind the attention.
            qkv: [T, (H + 2 * K) * D] contiguous, rows as [decode rows | prefill rows]; may be overwritten.

        Returns:
            [T, H * D] contiguous.
        """
        kv, slots, scale = self._layers[index], self._metadata.slot_mapping, self._scales[index]
        if not self._fused:
            q, k, v = split_heads(self._config, layer, qkv, self._rope)
            write_kv(k, v, kv, slots, kv_scale=scale)
            return self._attend(index, q)
        ahead = None
        if self._prefetches and not layer.output.prefetches(len(qkv)):
            ahead = layer.next_weights
        q = rope_and_write_kv(
            qkv,
            CacheSlots(kv, slots, scale),
            self._rope,
            self._positions,
            norms=layer.head_norms,
            ahead=ahead,
            pdl=self._pdl,
        )
        return self._attend(index, q)

    def _attend(self, index: int, q: Tensor) -> Tensor:
        """Attend to a cache that holds the step's keys and values: [T, H, D] to [T, H * D] contiguous."""
        kv, scale = self._layers[index], self._scales[index]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode, prefill = self._plans[index]
        split = self._metadata.num_decode_tokens
        if decode is not None:
            decode_attention(q[:split], kv, decode, out[:split], kv_scale=scale)
        if prefill is not None:
            prefill_attention(q[split:], kv, prefill, out[split:], kv_scale=scale)
        return out.flatten(-2)

    def _most_bytes(self) -> int:
        """Bytes of keys and values that a layer reads at most."""
        kv = self._layers[0]
        return self._metadata.most_keys * 2 * kv.shape[3] * kv.shape[4] * kv.dtype.itemsize


def split_heads(
    config: ModelConfig, layer: BoundLayer, qkv: Tensor, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into heads, normalize per head where the family does, and rotate queries and keys.

    Args:
        config: of the model.
        layer: its norms.
        qkv: [..., (H + 2 * K) * D].
        rope: cos and sin as `kernels.apply_rope` takes them.

    Returns:
        Queries [..., H, D], keys and values [..., K, D]; contiguous in D.
    """
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    heads = qkv.view(*qkv.shape[:-1], num_heads + 2 * num_kv_heads, config.head_dim)
    rotating, v = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], -2)
    if layer.head_norms is not None:
        q, k = torch.split(rotating, [num_heads, num_kv_heads], -2)
        q_norm, k_norm = layer.head_norms
        rotating = torch.cat((rms_norm(q, *q_norm), rms_norm(k, *k_norm)), -2)
    q, k = torch.split(apply_rope(rotating, *rope), [num_heads, num_kv_heads], -2)
    return q, k, v
