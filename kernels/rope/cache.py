"""Normalizes and rotates queries and keys and writes keys and values to the cache: what the rows of the registry do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.weights import Norm


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

    def without_heads(self) -> CacheSlots:
        """Return the cache as one of no heads, to which nothing is written."""
        return self._replace(kv=self.kv[:, :, :, :0])


class HeadNorms(NamedTuple):
    """The norms of heads before the rotation.

    Attributes:
        queries: over D.
        keys: over D, with the same eps.
        values_eps: eps of a norm of values without a weight; None if they have none.
    """

    queries: Norm
    keys: Norm
    values_eps: float | None = None


class Rotation(Protocol):
    """The rotation of a step's tokens, for all layers with the same rotary embedding."""

    def __call__(
        self,
        qkv: Tensor,
        cache: CacheSlots,
        norms: HeadNorms | None,
        ahead: tuple[Tensor, Tensor] | None = None,
        /,
    ) -> Tensor:
        """Normalize queries and keys per head, rotate them, and write keys and values to their slots.

        Over an FP8 cache, queries and keys are then also multiplied by `kernels.hadamard.hadamard_matrix`.

        Args:
            qkv: [T, (H + 2 * K) * D], rows contiguous; may be overwritten.
            cache: cache and slots; a view without heads, `CacheSlots.without_heads`, for queries alone.
            norms: of heads; None where the family has none.
            ahead: weights of the next products, more than 127 bytes each: at most 24 MiB of them may be prefetched to
                the second-level cache. This is faster only if the kernels before those products read little.

        Returns:
            The queries [T, H, D], possibly a view of `qkv`.
        """


class TritonRotation:
    """Does everything in one launch on a GPU; see `Rotation`.

    Args:
        tables: cos and sin of all positions, [positions, 1, D] contiguous each, as `rope_tables` returns them, in
            qkv's dtype.
        positions: [T] int64, rows of the tables.
        batch_invariant: whether a token's results must have the same bits among any others.
        pdl: use programmatic dependent launch. `positions` and slots are then read before the wait: the kernels that
            wrote them must be followed by a launch without `pdl` before this one.
    """

    def __init__(
        self,
        tables: tuple[Tensor, Tensor],
        positions: Tensor,
        *,
        batch_invariant: bool = False,
        pdl: bool = False,
    ) -> None:
        self._tables, self._positions = tables, positions
        self._batch_invariant, self._pdl = batch_invariant, pdl

    def __call__(
        self,
        qkv: Tensor,
        cache: CacheSlots,
        norms: HeadNorms | None,
        ahead: tuple[Tensor, Tensor] | None = None,
        /,
    ) -> Tensor:
        """See `Rotation.__call__`."""
        # Imported here because Triton is not installed on every host.
        from kernels.rope.gpu import rope_cache  # noqa: PLC0415

        kv, slots, scale = cache
        return rope_cache.rope_and_write_kv(
            qkv,
            kv,
            self._tables,
            self._positions,
            slots,
            norms=None if norms is None else (norms.queries.weight, norms.keys.weight),
            eps=0.0 if norms is None else norms.queries.eps,
            value_eps=None if norms is None else norms.values_eps,
            kv_scale=scale,
            ahead=ahead,
            batch_invariant=self._batch_invariant,
            pdl=self._pdl,
        )
