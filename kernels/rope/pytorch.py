"""Rotary embedding in PyTorch, for every device; without a cache it is differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention.functional import write_kv
from kernels.hadamard import hadamard_transform
from kernels.norms.pytorch import rms_norm

if TYPE_CHECKING:
    from kernels.rope.cache import CacheSlots, HeadNorms


class PyTorchRotation:
    """Rotates and writes by separate operations; see `kernels.rope.cache.Rotation`.

    Args:
        tables: as for `TritonRotation`, as are the other arguments.
        positions: [T] int64.
        batch_invariant: without effect, since PyTorch's products decide the bits of a row.
        pdl: without effect.
    """

    def __init__(
        self, tables: tuple[Tensor, Tensor], positions: Tensor, *, batch_invariant: bool, pdl: bool
    ) -> None:
        del batch_invariant, pdl
        cos, sin = tables
        self._rope = cos.index_select(0, positions), sin.index_select(0, positions)

    def __call__(
        self,
        qkv: Tensor,
        cache: CacheSlots,
        norms: HeadNorms | None,
        _ahead: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `Rotation.__call__`."""
        kv, slots, scale = cache
        kv_heads, head_dim = kv.shape[3:]
        q, k, v = split_heads(qkv, head_dim, kv_heads, norms, self._rope)
        if not kv_heads:
            return q if scale is None else hadamard_transform(q)
        if scale is not None:
            q, k = hadamard_transform(q), hadamard_transform(k)
        write_kv(k, v, kv, slots, kv_scale=scale)
        return q


def split_heads(
    qkv: Tensor,
    head_dim: int,
    num_kv_heads: int,
    norms: HeadNorms | None,
    rope: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Split queries, keys and values into heads, normalize them, and rotate queries and keys.

    Args:
        qkv: [..., (H + 2 * K) * D].
        head_dim: D.
        num_kv_heads: K; 0 for queries alone.
        norms: of heads; None for none.
        rope: cos and sin, as for `apply_rope`.

    Returns:
        Queries [..., H, D], keys and values [..., K, D]; contiguous in D.
    """
    heads = qkv.view(*qkv.shape[:-1], -1, head_dim)
    counts = [heads.shape[-2] - 2 * num_kv_heads, num_kv_heads]
    rotating, v = torch.split(heads, [sum(counts), num_kv_heads], -2)
    if norms is not None:
        parts = zip(torch.split(rotating, counts, -2), norms[:2], strict=True)
        rotating = torch.cat([rms_norm(part, *norm) for part, norm in parts if part.shape[-2]], -2)
        if norms.values_eps is not None and num_kv_heads:
            v = functional.rms_norm(v, (head_dim,), eps=norms.values_eps)
    q, k = torch.split(apply_rope(rotating, *rope), counts, -2)
    return q, k, v


def rope_tables(
    angles: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Compute the two tables for `apply_rope` from rotation angles.

    Args:
        angles: [..., D / 2] float32, radians: position times inverse frequency.
        scale: factor on both tables (the attention factor of YaRN; 1 elsewhere).
        dtype: of the tables; that of the queries.

    Returns:
        cos and sin, each [..., 1, D] contiguous; the first half of sin is negated, so that a
        rotation is x * cos + swap_halves(x) * sin.
    """
    cos = angles.cos().mul_(scale)
    sin = angles.sin().mul_(scale)
    return (
        torch.cat((cos, cos), dim=-1).unsqueeze(-2).to(dtype),
        torch.cat((-sin, sin), dim=-1).unsqueeze(-2).to(dtype),
    )


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D / 2]) of every head: the "rotate half" layout.

    Adjacent queries and keys can be rotated in one call, since heads are a batch dimension.

    Args:
        x: [..., heads, D] with any strides; [T, heads, D] when packed, [B, S, heads, D] when dense.
        cos: [T, 1, D] or [S, 1, D] from `rope_tables`, in x's dtype.
        sin: the same, from the same call.

    Returns:
        A new tensor of x's shape and dtype.

    Source: Su et al., RoFormer, 2021, eq. 34, with the pairs half a head apart.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
