"""Attention of a layer: over the paged KV cache for serving, over whole sequences for training."""

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
from kernels.hadamard import hadamard_transform
from kernels.rope.cache import CacheSlots, rope_and_write_kv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from model.device.kv_cache import KVCache
    from model.network.layers import BoundLayer
    from model.network.metadata import AttentionMetadata
    from model.network.rope import RotaryEmbedding

_LITTLE_BYTES: Final = 16 << 20
"""Weights are prefetched into the L2 cache before attention only if a layer reads at most this many bytes of keys and
values; more would evict the weights before they are used."""
_FEW_ROWS: Final = 64
"""Weights are prefetched only in steps of at most this many tokens; larger steps are not bound by reading weights."""


class DenseAttention:
    """Causal attention among the tokens of the call. It is differentiable and uses no cache.

    Args:
        ropes: cos and sin, as for `kernels.apply_rope`, of each of `rotaries`.
    """

    def __init__(self, ropes: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._ropes = ropes

    def __call__(self, index: int, layer: BoundLayer, qkv: Tensor) -> Tensor:
        """Compute attention: [B, L, (H + 2 * K) * D] to [B, L, H * D], for sequences of L tokens."""
        del index
        mixer = layer.mixer
        assert mixer.softcap is None, "dense attention caps no scores"
        q, k, v = split_heads(layer, qkv, self._ropes[layer.rotary])
        return flash_attention(q, k, v, mixer.scale, mixer.window).flatten(-2)


class PagedAttention:
    """Attention of one step over the KV cache. The keys and values of the step's tokens are written to the cache first.

    Args:
        kv_cache: the cache; written.
        metadata: the step's attention metadata.
        ropes: the layers' rotary embeddings, as `rotaries` lists them, with the step's positions reserved.
        positions: [T] int64.
        fused: whether one Triton kernel computes the per-head norms, the rotation and the cache write; PyTorch
            computes them otherwise.
        pdl: whether that kernel may start before the previous one ends (programmatic dependent launch).
        batch_invariant: whether a token's results must have the same bits among any others.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        ropes: Sequence[RotaryEmbedding],
        positions: Tensor,
        *,
        fused: bool,
        pdl: bool,
        batch_invariant: bool = False,
    ) -> None:
        self._metadata, self._positions = metadata, positions
        self._layers, self._scales = kv_cache.layers, kv_cache.scales
        self._fused, self._pdl, self._batch_invariant = fused, pdl, batch_invariant
        self._ropes = [it.tables if fused else it.table(positions) for it in ropes]
        self._prefetches = pdl and not batch_invariant and len(positions) <= _FEW_ROWS

    def __call__(self, index: int, layer: BoundLayer, qkv: Tensor) -> Tensor:
        """Write keys and values to the cache, then compute attention.

        Args:
            index: the layer's index.
            layer: the layer.
            qkv: [T, (H + 2 * K) * D] contiguous, rows as [decode rows | prefill rows]; may be overwritten.

        Returns:
            [T, H * D] contiguous.
        """
        kv, slots, scale = self._layers[index], self._metadata.slot_mapping, self._scales[index]
        if not self._fused:
            q, k, v = split_heads(layer, qkv, self._ropes[layer.rotary])
            if scale is not None:
                q, k = hadamard_transform(q), hadamard_transform(k)
            write_kv(k, v, kv, slots, kv_scale=scale)
            return self._attend(index, layer, q)
        ahead = None
        if (
            self._prefetches
            and self._most_bytes(kv) <= _LITTLE_BYTES
            and not layer.output.prefetches(len(qkv))
        ):
            ahead = layer.next_weights
        q = rope_and_write_kv(
            qkv,
            CacheSlots(kv, slots, scale),
            self._ropes[layer.rotary],
            self._positions,
            norms=layer.head_norms,
            ahead=ahead,
            batch_invariant=self._batch_invariant,
            pdl=self._pdl,
        )
        return self._attend(index, layer, q)

    def _attend(self, index: int, layer: BoundLayer, q: Tensor) -> Tensor:
        """Compute attention over a cache that already holds the step's tokens: [T, H, D] to [T, H * D] contiguous."""
        kv, scale = self._layers[index], self._scales[index]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode, prefill = self._metadata.plans[layer.problem]
        split = self._metadata.num_decode_tokens
        if decode is not None:
            decode_attention(q[:split], kv, decode, out[:split], kv_scale=scale)
        if prefill is not None:
            prefill_attention(q[split:], kv, prefill, out[split:], kv_scale=scale)
        return out.flatten(-2)

    def _most_bytes(self, kv: Tensor) -> int:
        """Upper bound of the bytes of keys and values that a layer reads of its cache."""
        return self._metadata.most_keys * 2 * kv.shape[3] * kv.shape[4] * kv.dtype.itemsize


def split_heads(
    layer: BoundLayer, qkv: Tensor, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the QKV projection into heads, apply the per-head norms if there are any, and rotate queries and keys.

    Args:
        layer: the layer.
        qkv: [..., (H + 2 * K) * D].
        rope: cos and sin, as for `kernels.apply_rope`.

    Returns:
        Queries [..., H, D], keys and values [..., K, D]; contiguous in D.
    """
    num_heads, num_kv_heads = layer.mixer.num_heads, layer.mixer.num_kv_heads
    heads = qkv.view(*qkv.shape[:-1], num_heads + 2 * num_kv_heads, layer.mixer.head_dim)
    rotating, v = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], -2)
    if layer.head_norms is not None:
        q, k = torch.split(rotating, [num_heads, num_kv_heads], -2)
        q_norm, k_norm = layer.head_norms
        rotating = torch.cat((rms_norm(q, *q_norm), rms_norm(k, *k_norm)), -2)
    q, k = torch.split(apply_rope(rotating, *rope), [num_heads, num_kv_heads], -2)
    return q, k, v
