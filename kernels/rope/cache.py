"""Normalizes and rotates queries and keys and writes keys and values to the cache, in one launch on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.weights import Norm

__all__ = ["CacheSlots", "rope_and_write_kv"]


class CacheSlots(NamedTuple):
    """The cache and the slots of a step's keys and values.

    Attributes:
        kv: [2, N, S, K, D] contiguous, in the queries' dtype or float8_e4m3fn; index 0 keys, 1 values.
        slots: [T] int32; -1 skips a token.
        scale: of a float8_e4m3fn cache, as `kernels.write_kv` takes it.
    """

    kv: Tensor
    slots: Tensor
    scale: Tensor | None


def rope_and_write_kv(
    qkv: Tensor,
    cache: CacheSlots,
    rope: tuple[Tensor, Tensor],
    positions: Tensor,
    *,
    norms: tuple[Norm, Norm] | None,
    ahead: tuple[Tensor, Tensor] | None = None,
    batch_invariant: bool = False,
    pdl: bool,
) -> Tensor:
    """Normalize queries and keys per head, apply rotary embeddings, and write keys and values to their slots.

    Over an FP8 cache, queries and keys are then also multiplied by `kernels.hadamard.hadamard_matrix`.

    Args:
        qkv: [T, (H + 2 * K) * D] contiguous; is overwritten.
        cache: cache and slots.
        rope: cos and sin of all positions, [positions, 1, D] contiguous each, as `rope_tables` returns them, in
            qkv's dtype.
        positions: [T] int64, rows of `rope`.
        norms: of queries and keys, over D; None where the family has none.
        ahead: weights of the next products, more than 127 bytes each: at most 24 MiB of them are prefetched to the
            second-level cache. This is faster only if the kernels before those products read little.
        batch_invariant: whether a token's results must have the same bits among any others.
        pdl: use programmatic dependent launch. `positions` and slots are then read before the wait: the kernels that
            wrote them must be followed by a launch without `pdl` before this one.

    Returns:
        The queries [T, H, D], a view of `qkv`.
    """
    # Imported here because Triton is not installed on every host.
    from kernels.rope.gpu import rope_cache  # noqa: PLC0415

    kv, slot_mapping, kv_scale = cache
    return rope_cache.rope_and_write_kv(
        qkv,
        kv,
        rope,
        positions,
        slot_mapping,
        norms=None if norms is None else (norms[0].weight, norms[1].weight),
        eps=0.0 if norms is None else norms[0].eps,
        kv_scale=kv_scale,
        ahead=ahead,
        batch_invariant=batch_invariant,
        pdl=pdl,
    )
