"""Attention of a layer: over the paged KV cache for serving, over whole sequences for training."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

import torch

from kernels import Phase, decode_attention, flash_attention, prefill_attention
from kernels.linear.projection import Norm
from kernels.rope.cache import CacheSlots, HeadNorms
from kernels.rope.pytorch import split_heads
from kernels.selection import load
from model.network.attention_problems import attention_problems, same_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

    from kernels.linear.projection import Projection, Residual, ResidualWriter
    from kernels.rope.cache import Rotation
    from kernels.selection import VectorSpec
    from model.device.kv_cache import KVCache
    from model.executors.layers.attention_plans import AttentionMetadata
    from model.executors.layers.binder import Binder
    from model.network.layers import DecoderLayer
    from model.network.rope import RotaryEmbedding
    from model.network.spec import Attention, QueryScale
    from model.network.spec import Norm as NormSpec

_LITTLE_BYTES: Final = 16 << 20
"""Weights are prefetched into the L2 cache before attention only if a layer reads at most this many bytes of keys and
values; more would evict the weights before they are used."""
BoundNorm: TypeAlias = "Callable[[Tensor], Tensor]"
_FEW_ROWS: Final = 64
"""Weights are prefetched only in steps of at most this many tokens; larger steps are not bound by reading weights."""


class BoundAttention(NamedTuple):
    """Attention with its projections.

    Attributes:
        spec: what it computes, of this rank's heads.
        qkv: includes the layer's first norm; reads the residual stream. Its first outputs are the gate, if any.
        head_norms: norms of heads before the rotation; None if the family has none.
        late_weights: weights of the norms of queries and of keys after the rotation; None if the family has none.
        joint_norms: norms of all query heads and of all key heads of a token, or with weights of each head; None if
            the family has none.
        output: adds to the residual stream, after a norm if the family has one there.
        next_weights: the matrices that are read after attention, in that order.
        problem: index of its problem in `AttentionPlanner.mixers`.
        rotary: index of its rotary embedding in `Network.rotaries`.
        output_gate: multiplies the result by the sigmoid of the gate; None if there is none.
    """

    spec: Attention
    qkv: Projection
    head_norms: HeadNorms | None
    late_weights: tuple[Tensor, Tensor] | None
    joint_norms: tuple[BoundNorm, BoundNorm] | None
    output: ResidualWriter
    next_weights: tuple[Tensor, Tensor]
    problem: int
    rotary: int
    output_gate: Callable[[Tensor, Tensor], Tensor] | None = None

    @classmethod
    def bind(cls, spec: Attention, binder: Binder) -> BoundAttention:
        """Bind a layer's attention."""
        layer, network = binder.layer, binder.model.network
        head_norms = joint_norms = late_weights = None
        if spec.qk_norm is not None:
            assert layer.q_norm is not None
            # Queries alone have no keys to be normalized.
            k_norm = layer.q_norm if layer.k_norm is None else layer.k_norm
            eps = spec.qk_norm.eps
            norms = HeadNorms(
                Norm(layer.q_norm, eps), Norm(k_norm, eps), eps if spec.value_norm else None
            )
            if spec.qk_norm_by_head:
                joint_norms = (
                    _norm_by_head(layer.q_norm, spec.qk_norm, spec.head_dim),
                    _norm_by_head(k_norm, spec.qk_norm, spec.head_dim),
                )
            elif spec.late_qk_norm:
                late_weights = layer.q_norm, k_norm
                _ones(spec.head_dim, *_place(layer.q_norm))  # not while a step is recorded
            elif spec.joint_qk_norm:
                joint_norms = binder.norm(norms[0]), binder.norm(norms[1])
            else:
                head_norms = norms
        return cls(
            spec,
            binder.reading("qkv"),
            head_norms,
            late_weights,
            joint_norms,
            binder.adding("output"),
            _after(layer, "qkv"),
            attention_problems(network).index(same_problem(spec)),
            network.rotaries.index((spec.rotary, spec.head_dim)),
            binder.output_gate() if spec.gate else None,
        )

    @property
    def norms(self) -> HeadNorms | None:
        """The norms of heads that the rotation includes.

        A rotation does not change the length of a head, so the division by its root mean square may come first; the
        weights follow it in `scaled_queries`.
        """
        if self.late_weights is None:
            return self.head_norms
        assert self.spec.qk_norm is not None
        norm = Norm(_ones(self.spec.head_dim, *_place(self.late_weights[0])), self.spec.qk_norm.eps)
        return HeadNorms(norm, norm)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values that it computes: 0 if it reads those of another layer."""
        return self.spec.num_kv_heads if self.spec.kv_layer is None else 0

    def scaled_queries(self, q: Tensor, scales: QueryScales) -> Tensor:
        """Multiply rotated queries, [..., H, D], by what scores have beside the products of queries and keys."""
        factor = None
        if self.late_weights is not None:
            # A score has the weights of queries and keys as one product, so keys need none in the cache.
            factor = self.late_weights[0].float() * self.late_weights[1].float()
        if self.spec.query_scale is not None:
            by_position = scales.of(self.spec.query_scale)
            factor = by_position if factor is None else factor * by_position
        return q if factor is None else (q.float() * factor).to(q.dtype)

    def read(self, index: int, residual: Residual, attend: Attend) -> tuple[Tensor, Residual]:
        """See `BoundMixer.read`."""
        qkv, residual = self.qkv.from_residual(residual)
        if self.output_gate is None:
            return attend(index, self, self._normalized(qkv)), residual
        gate_size = self.spec.num_heads * self.spec.head_dim
        gate, qkv = qkv[..., :gate_size], qkv[..., gate_size:]
        return self.output_gate(attend(index, self, self._normalized(qkv)), gate), residual

    def _normalized(self, qkv: Tensor) -> Tensor:
        """Return queries, keys and values with the norms that are of more than a head."""
        if self.joint_norms is not None:
            sizes = [
                it * self.spec.head_dim for it in (self.spec.num_heads, self.spec.num_kv_heads)
            ]
            q, k, v = qkv.split_with_sizes([*sizes, sizes[1]], -1)
            qkv = torch.cat((self.joint_norms[0](q), self.joint_norms[1](k), v), -1)
        if self.spec.tied_values:
            keys = self.spec.num_kv_heads * self.spec.head_dim
            qkv = torch.cat((qkv, qkv[..., -keys:]), -1)
        return qkv


def _norm_by_head(weight: Tensor, norm: NormSpec, head_dim: int) -> BoundNorm:
    """Return the norm of each head of [..., heads * D], whose weight has the same size; it computes in float32."""

    def normalize(x: Tensor) -> Tensor:
        heads = x.float().view(*x.shape[:-1], -1, head_dim)
        if norm.kind == "layer":
            heads = heads - heads.mean(-1, keepdim=True)
        scale = torch.rsqrt(heads.square().mean(-1, keepdim=True) + norm.eps)
        normalized: Tensor = (heads * scale).flatten(-2)
        return (normalized * weight.float()).to(x.dtype)

    return normalize


def _place(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


# Without a limit, since recorded steps read the tensors; there is one for each model.
@functools.cache
def _ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):  # for training too
        return torch.ones(size, dtype=dtype, device=device)


class QueryScales:
    """The factors on the queries of a step by their positions, computed once for all layers.

    Args:
        positions: [...] int64.
    """

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions
        self._found: dict[QueryScale, Tensor] = {}

    def of(self, scale: QueryScale) -> Tensor:
        """Return the factors, [..., 1, 1] float32."""
        if scale not in self._found:
            grown = torch.floor(self._positions.float() / scale.original)
            self._found[scale] = (1 + scale.beta * torch.log(1 + grown))[..., None, None]
        return self._found[scale]


def _after(layer: DecoderLayer, name: str) -> tuple[Tensor, Tensor]:
    """Return the numbers of the two matrices that are read after one; the last one twice if there are no more."""
    matrices = layer.matrices
    names = [*matrices][[*matrices].index(name) + 1 :]
    return matrices[names[0]].numbers, matrices[names[min(1, len(names) - 1)]].numbers


class Attend(Protocol):
    """Attention of the layers of a step."""

    def __call__(self, index: int, attention: BoundAttention, qkv: Tensor) -> Tensor:
        """Compute attention from the QKV projection.

        Args:
            index: the layer's index.
            attention: of the layer.
            qkv: [..., (H + 2 * K) * D], or [..., H * D] of a layer that reads the keys and values of another one; may
                be overwritten.

        Returns:
            [..., H * D].
        """


class DenseAttention:
    """Causal attention among the tokens of the call. It is differentiable and uses no cache.

    Args:
        ropes: cos and sin, as for `kernels.apply_rope`, of each of `rotaries`.
        positions: [L] int64.
        sources: indices of the layers whose keys and values others read.
    """

    def __init__(
        self,
        ropes: Sequence[tuple[Tensor, Tensor]],
        positions: Tensor,
        sources: Collection[int] = (),
    ) -> None:
        self._ropes = ropes
        self._scales = QueryScales(positions)
        self._sources = sources
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, index: int, attention: BoundAttention, qkv: Tensor) -> Tensor:
        """Compute attention: [B, L, (H + 2 * K) * D] to [B, L, H * D], for sequences of L tokens."""
        mixer = attention.spec
        assert mixer.softcap is None, "dense attention caps no scores"
        rope = self._ropes[attention.rotary]
        heads = attention.num_kv_heads
        q, k, v = split_heads(qkv, mixer.head_dim, heads, attention.norms, rope)
        if mixer.kv_layer is not None:
            k, v = self._kept[mixer.kv_layer]
        elif index in self._sources:
            self._kept[index] = k, v
        q = attention.scaled_queries(q, self._scales)
        return flash_attention(q, k, v, mixer.scale, mixer.window).flatten(-2)


class PagedAttention:
    """Attention of one step over the KV cache. The keys and values of the step's tokens are written to the cache first.

    Args:
        kv_cache: the cache; written.
        metadata: the step's attention metadata.
        ropes: the layers' rotary embeddings, as `rotaries` lists them, with the step's positions reserved.
        positions: [T] int64.
        rotation: the row of `kernels.rope.registry` that computes the per-head norms, the rotation and the cache write.
        pdl: whether its kernel may start before the previous one ends (programmatic dependent launch).
        batch_invariant: whether a token's results must have the same bits among any others.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        ropes: Sequence[RotaryEmbedding],
        positions: Tensor,
        *,
        rotation: VectorSpec,
        pdl: bool,
        batch_invariant: bool = False,
    ) -> None:
        self._metadata = metadata
        self._layers, self._scales = kv_cache.layers, kv_cache.scales
        rotate = load(rotation.target)
        self._rotations: list[Rotation] = [
            rotate(it.tables, positions, batch_invariant=batch_invariant, pdl=pdl) for it in ropes
        ]
        self._query_scales = QueryScales(positions)
        self._prefetches = pdl and not batch_invariant and len(positions) <= _FEW_ROWS

    def __call__(self, index: int, attention: BoundAttention, qkv: Tensor) -> Tensor:
        """Write keys and values to the cache, then compute attention.

        Args:
            index: the layer's index.
            attention: of the layer.
            qkv: [T, (H + 2 * K) * D] or [T, H * D], as above, contiguous, rows as [decode rows | prefill rows]; may be
                overwritten.

        Returns:
            [T, H * D] contiguous.
        """
        kv, slots, scale = self._layers[index], self._metadata.slot_mapping, self._scales[index]
        ahead = None
        if (
            self._prefetches
            and self._most_bytes(kv) <= _LITTLE_BYTES
            and not attention.output.prefetches(len(qkv))
        ):
            ahead = attention.next_weights
        cache = CacheSlots(kv, slots, scale)
        if not attention.num_kv_heads:
            cache = cache.without_heads()
        q = self._rotations[attention.rotary](qkv, cache, attention.norms, ahead)
        q = attention.scaled_queries(q, self._query_scales)
        return self._attend(index, attention.problem, q)

    def of_rotated(self, index: int, problem: int, rotary: int, qkv: Tensor) -> Tensor:
        """Do the same with queries and keys that need no norm and are rotated already.

        Args:
            index: as above.
            problem: as of `BoundAttention`.
            rotary: index of a rotary embedding of None in `Network.rotaries`.
            qkv: as above.
        """
        cache = CacheSlots(self._layers[index], self._metadata.slot_mapping, self._scales[index])
        return self._attend(index, problem, self._rotations[rotary](qkv, cache, None))

    def _attend(self, index: int, problem: int, q: Tensor) -> Tensor:
        """Compute attention over a cache that already holds the step's tokens: [T, H, D] to [T, H * D] contiguous."""
        kv, scale = self._layers[index], self._scales[index]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode, prefill = self._metadata.plans[problem]
        split = self._metadata.num_decode_tokens
        if decode is not None:
            # Kernels of prefill take rows of several tokens where those of decode take one.
            by_decode = decode.problem.phase is Phase.DECODE
            attend = decode_attention if by_decode else prefill_attention
            attend(q[:split], kv, decode, out[:split], kv_scale=scale)
        if prefill is not None:
            prefill_attention(q[split:], kv, prefill, out[split:], kv_scale=scale)
        return out.flatten(-2)

    def _most_bytes(self, kv: Tensor) -> int:
        """Upper bound of the bytes of keys and values that a layer reads of its cache."""
        return self._metadata.most_keys * 2 * kv.shape[3] * kv.shape[4] * kv.dtype.itemsize
