"""Attention of a layer: over the paged KV cache for serving, over whole sequences for training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import torch

from kernels import (
    Phase,
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
    from torch import Tensor

    from model.checkpoint.config import ModelConfig
    from model.device.kv_cache import KVCache
    from model.network.layers import BoundLayer
    from model.network.metadata import AttentionMetadata
    from model.network.rope import RotaryEmbedding

T = TypeVar("T")

_LITTLE_BYTES: Final = 16 << 20
"""Weights are prefetched into the L2 cache before attention only if a layer reads at most this many bytes of keys and
values; more would evict the weights before they are used."""
_FEW_ROWS: Final = 64
"""Weights are prefetched only in steps of at most this many tokens; larger steps are not bound by reading weights."""


class DenseAttention:
    """Causal attention among the tokens of the call. It is differentiable and uses no cache.

    Args:
        config: the model's configuration, without a softcap of attention scores.
        rope: cos and sin, as for `kernels.apply_rope`.
        local_rope: the same for layers with a sliding window.
    """

    def __init__(
        self,
        config: ModelConfig,
        rope: tuple[Tensor, Tensor],
        local_rope: tuple[Tensor, Tensor],
    ) -> None:
        assert config.attention_softcap is None, "dense attention caps no scores"
        self._config = config
        self._ropes = by_layer(config, rope, local_rope)

    def __call__(self, index: int, layer: BoundLayer, qkv: Tensor) -> Tensor:
        """Compute attention: [B, L, (H + 2 * K) * D] to [B, L, H * D], for sequences of L tokens."""
        q, k, v = split_heads(self._config, layer, qkv, self._ropes[index])
        window = self._config.layer_window(index)
        return flash_attention(q, k, v, self._config.softmax_scale, window).flatten(-2)


class PagedAttention:
    """Attention of one step over the KV cache. The keys and values of the step's tokens are written to the cache first.

    Args:
        config: the model's configuration.
        kv_cache: the cache; written.
        metadata: the step's attention metadata.
        ropes: rotary embeddings, with the step's positions reserved, of layers that attend to all tokens and of layers
            with a sliding window; often the same.
        positions: [T] int64.
        fused: whether one Triton kernel computes the per-head norms, the rotation and the cache write; PyTorch
            computes them otherwise.
        pdl: whether that kernel may start before the previous one ends (programmatic dependent launch).
        batch_invariant: whether a token's results must have the same bits among any others.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        ropes: tuple[RotaryEmbedding, RotaryEmbedding],
        positions: Tensor,
        *,
        fused: bool,
        pdl: bool,
        batch_invariant: bool = False,
    ) -> None:
        self._config, self._metadata, self._positions = config, metadata, positions
        self._layers, self._scales = kv_cache.layers, kv_cache.scales
        plans = sliding = (metadata.decode, metadata.prefill)
        if config.mixes_attention:
            sliding = (metadata.sliding_decode, metadata.sliding_prefill)
        self._plans = by_layer(config, plans, sliding)
        self._fused, self._pdl, self._batch_invariant = fused, pdl, batch_invariant
        tables = [it.tables if fused else it.table(positions) for it in dict.fromkeys(ropes)]
        self._ropes = by_layer(config, tables[0], tables[-1])
        self._prefetches = (
            pdl
            and not batch_invariant
            and len(positions) <= _FEW_ROWS
            and self._most_bytes() <= _LITTLE_BYTES
        )

    def __call__(self, index: int, layer: BoundLayer, qkv: Tensor) -> Tensor:
        """Write keys and values to the cache, then compute attention.

        Args:
            index: the layer's index.
            layer: provides the per-head norms and the weights to prefetch.
            qkv: [T, (H + 2 * K) * D] contiguous, rows as [decode rows | prefill rows]; may be overwritten.

        Returns:
            [T, H * D] contiguous.
        """
        kv, slots, scale = self._layers[index], self._metadata.slot_mapping, self._scales[index]
        if not self._fused:
            q, k, v = split_heads(self._config, layer, qkv, self._ropes[index])
            if scale is not None:
                q, k = hadamard_transform(q), hadamard_transform(k)
            write_kv(k, v, kv, slots, kv_scale=scale)
            return self._attend(index, q)
        ahead = None
        if self._prefetches and not layer.output.prefetches(len(qkv)):
            ahead = layer.next_weights
        q = rope_and_write_kv(
            qkv,
            CacheSlots(kv, slots, scale),
            self._ropes[index],
            self._positions,
            norms=layer.head_norms,
            ahead=ahead,
            batch_invariant=self._batch_invariant,
            pdl=self._pdl,
        )
        return self._attend(index, q)

    def _attend(self, index: int, q: Tensor) -> Tensor:
        """Compute attention over a cache that already holds the step's tokens: [T, H, D] to [T, H * D] contiguous."""
        kv, scale = self._layers[index], self._scales[index]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode, prefill = self._plans[index]
        split = self._metadata.num_decode_tokens
        if decode is not None:
            # Kernels of prefill take rows of several tokens where those of decode take one.
            by_decode = decode.problem.phase is Phase.DECODE
            attend = decode_attention if by_decode else prefill_attention
            attend(q[:split], kv, decode, out[:split], kv_scale=scale)
        if prefill is not None:
            prefill_attention(q[split:], kv, prefill, out[split:], kv_scale=scale)
        return out.flatten(-2)

    def _most_bytes(self) -> int:
        """Upper bound of the bytes of keys and values that a layer reads."""
        kv = self._layers[0]
        return self._metadata.most_keys * 2 * kv.shape[3] * kv.shape[4] * kv.dtype.itemsize


def by_layer(config: ModelConfig, full: T, sliding: T) -> list[T]:
    """Return for each layer the value for its kind."""
    return [sliding if kind == "sliding_attention" else full for kind in config.layer_types]


def split_heads(
    config: ModelConfig, layer: BoundLayer, qkv: Tensor, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the QKV projection into heads, apply the per-head norms if there are any, and rotate queries and keys.

    Args:
        config: the model's configuration.
        layer: provides the per-head norms.
        qkv: [..., (H + 2 * K) * D].
        rope: cos and sin, as for `kernels.apply_rope`.

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
