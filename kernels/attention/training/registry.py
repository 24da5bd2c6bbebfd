"""Attention for training: the problem, and the rows that compute it forward and backward, most preferred first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from kernels.arch import HOPPER, TENSOR_CORES, GPUArch
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.registry import HOPPER_PREFILL, PORTABLE_PREFILL
from kernels.selection import choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.attention.spec import KernelSpec

_LARGEST_HEAD_DIM: Final = 256
A_MILLISECOND: Final = 4e11
"""Operations of a forward that take Hopper's prefill kernel a millisecond; planning it takes the host about as long."""


@dataclass(frozen=True, slots=True)
class TrainingProblem:
    """The properties of attention over whole sequences that decide how it is computed.

    Dimensions: B sequences, T tokens of all of them, H query heads, K key-value heads, D head dim.

    Attributes:
        softmax_scale: factor on the scores.
        causal: whether query i of m sees no key after key n - m + i of n.
        sliding_window: keys that a query sees at most, the last one included; None for all. Only with `causal`.
        softcap: c in c * tanh(score / c); None for none.
        dropout_p: probability with which a weight is dropped; the others are divided by 1 - dropout_p.
        dropout_seed: of the random numbers that decide, see `kernels.attention.training.philox`.
        max_seqlen_q: tokens of the longest sequence of queries.
        max_seqlen_k: tokens of the longest sequence of keys.
        mask_tile: queries and keys of a tile of the block mask; (0, 0) without one.
        deterministic: whether every run must have the same bits.
    """

    softmax_scale: float
    causal: bool = True
    sliding_window: int | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    mask_tile: tuple[int, int] = (0, 0)
    deterministic: bool = True

    def as_prefill(self, q: Tensor, k: Tensor) -> AttentionProblem:
        """Return the forward without dropout, ALiBi and block mask as a problem of `kernels.plan_attention`.

        Args:
            q: [T, H, D].
            k: [T_k, K, D].

        Raises:
            ShapeError: the scale is not positive, or the service has no attention in that dtype.
        """
        return AttentionProblem(
            phase=Phase.PREFILL,
            dtype=str(q.dtype).removeprefix("torch."),
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            block_size=None,
            softmax_scale=self.softmax_scale,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            causal=self.causal,
            lse=True,
        )

    def num_operations(self, q: Tensor) -> float:
        """Return the floating-point operations of the forward: an upper bound if sequences differ in length.

        Args:
            q: [T, H, D].
        """
        return 4 * q.numel() * self.max_seqlen_k / (2 if self.causal else 1)

    def encode(self) -> tuple[list[int], list[float]]:
        """Return the problem as numbers, in which form PyTorch's operators take it."""
        window, softcap = self.sliding_window or 0, self.softcap or 0.0
        ints = [
            int(self.causal),
            window,
            self.dropout_seed,
            self.max_seqlen_q,
            self.max_seqlen_k,
            *self.mask_tile,
            int(self.deterministic),
        ]
        return ints, [self.softmax_scale, softcap, self.dropout_p]

    @classmethod
    def decode(cls, ints: Sequence[int], floats: Sequence[float]) -> TrainingProblem:
        """Return the problem that `encode` was called on."""
        causal, window, seed, max_q, max_k, tile_q, tile_k, deterministic = ints
        scale, softcap, dropout_p = floats
        return cls(
            softmax_scale=scale,
            causal=bool(causal),
            sliding_window=window or None,
            softcap=softcap or None,
            dropout_p=dropout_p,
            dropout_seed=seed,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            mask_tile=(tile_q, tile_k),
            deterministic=bool(deterministic),
        )


class TrainingBatch(NamedTuple):
    """The tensors that describe the sequences of a call and what they see.

    Attributes:
        cu_seqlens_q: [B + 1] int32, first query of each sequence, and T.
        cu_seqlens_k: [B + 1] int32, the same for keys.
        alibi_slopes: [B, H] float32, contiguous; slopes of the distance that is subtracted from scores, or None.
        mask: the arrays of a `BlockMask`; None for none.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    alibi_slopes: Tensor | None = None
    mask: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def encode(self) -> list[Tensor]:
        """Return the tensors that are not None, and an empty one for the slopes."""
        slopes = self.alibi_slopes
        empty = self.cu_seqlens_q.new_empty(0, dtype=torch.float32)
        return [
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            empty if slopes is None else slopes,
            *(self.mask or ()),
        ]

    @classmethod
    def decode(cls, tensors: Sequence[Tensor]) -> TrainingBatch:
        """Return the batch that `encode` was called on."""
        cu_q, cu_k, slopes, *mask = tensors
        arrays = cast("tuple[Tensor, Tensor, Tensor, Tensor] | None", tuple(mask) or None)
        return cls(cu_q, cu_k, slopes if slopes.numel() else None, arrays)


Grads: TypeAlias = "tuple[Tensor, Tensor]"
"""Of the two results of `TrainingKernel.forward`."""
Saved: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor, Tensor]"
"""q, k, v and the results of `TrainingKernel.forward`."""


class TrainingKernel(Protocol):
    """Computes attention of packed sequences and its gradients."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: TrainingBatch, problem: TrainingProblem
    ) -> tuple[Tensor, Tensor]:
        """Compute attention.

        Args:
            q: [T, H, D], contiguous in D.
            k: [T_k, K, D], contiguous in D.
            v: [T_k, K, D], contiguous in D.
            batch: the sequences.
            problem: how they attend.

        Returns:
            [T, H, D] in q's dtype, and the natural log-sum-exps [T, H] in float32 (float64 for float64). Rows that
            see nothing are 0 and -inf.
        """

    def backward(
        self, grads: Grads, saved: Saved, batch: TrainingBatch, problem: TrainingProblem
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of q, k and v."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """One row: a kernel and what it supports.

    Attributes:
        name: of the row.
        target: "module:attribute" of the `TrainingKernel`.
        cpu: whether it runs on a CPU.
        sm: compute capabilities that it supports; None for every GPU.
        dtypes: names of the supported dtypes.
        largest_head_dim: None for any.
        mask_tiles: divisor of the tiles of a block mask.
        arch_note: why other GPUs are unsupported.
        prefill: the row of `kernels.attention.registry` that computes its forward; None for a kernel of its own.
        fewest_operations: of a forward.
        head_dims: the supported ones; None for all up to `largest_head_dim`.
        softcap: whether scores can have one.
        deterministic: whether every run has the same bits.
    """

    name: str
    target: str
    cpu: bool = False
    sm: frozenset[int] | None = None
    dtypes: frozenset[str]
    largest_head_dim: int | None = None
    mask_tiles: int = 1
    arch_note: str = PORTABLE_PREFILL.arch_note
    prefill: KernelSpec | None = None
    fewest_operations: float = 0.0
    head_dims: frozenset[int] | None = None
    softcap: bool = True
    deterministic: bool = True

    def unsupported(
        self, q: Tensor, k: Tensor, batch: TrainingBatch, problem: TrainingProblem, arch: GPUArch
    ) -> tuple[str, ...]:
        """List why this row cannot compute a problem, or should not; empty if it can.

        Args:
            q: [T, H, D].
            k: [T_k, K, D].
            batch: the sequences.
            problem: how they attend.
            arch: processor of `q`.
        """
        dtype = str(q.dtype).removeprefix("torch.")
        reasons = []
        if arch.is_cpu and not self.cpu:
            reasons.append("needs a GPU")
        if not arch.is_cpu and self.sm is not None:
            reasons += arch.unsupported(self.sm, self.arch_note)
        if dtype not in self.dtypes:
            reasons.append(f"no {dtype}")
        if self.largest_head_dim is not None and q.shape[-1] > self.largest_head_dim:
            reasons.append(f"head_dim {q.shape[-1]} is more than {self.largest_head_dim}")
        if self.head_dims is not None and q.shape[-1] not in self.head_dims:
            reasons.append(f"head_dim {q.shape[-1]} is none of {sorted(self.head_dims)}")
        if problem.softcap is not None and not self.softcap:
            reasons.append("no softcap")
        if problem.deterministic and not self.deterministic:
            reasons.append("not deterministic")
        if any(tile % self.mask_tiles for tile in problem.mask_tile):
            reasons.append(
                f"block mask tiles {problem.mask_tile} are no multiples of {self.mask_tiles}"
            )
        if problem.num_operations(q) < self.fewest_operations:
            reasons.append(f"fewer than {self.fewest_operations:.0e} operations")
        if self.prefill is not None and not reasons:
            reasons += _unsupported_by_prefill(self.prefill, q, k, batch, problem, arch)
        return tuple(reasons)


def _unsupported_by_prefill(
    prefill: KernelSpec,
    q: Tensor,
    k: Tensor,
    batch: TrainingBatch,
    problem: TrainingProblem,
    arch: GPUArch,
) -> tuple[str, ...]:
    tests = (
        (problem.dropout_p > 0, "no dropout"),
        (batch.alibi_slopes is not None, "no ALiBi"),
        (batch.mask is not None, "no block mask"),
        (problem.softmax_scale <= 0, f"softmax_scale {problem.softmax_scale} is not above 0"),
    )
    reasons = tuple(reason for applies, reason in tests if applies)
    return reasons or prefill.unsupported(problem.as_prefill(q, k), arch)


TRAINING_REGISTRY: Final = (
    TrainingSpec(
        name="hopper_backward",
        target="kernels.attention.training.hopper.backward:ONE_PASS",
        sm=HOPPER,
        dtypes=frozenset({"bfloat16", "float16"}),
        arch_note=HOPPER_PREFILL.arch_note,
        prefill=HOPPER_PREFILL,
        head_dims=frozenset({64, 128}),
        softcap=False,
        deterministic=False,
    ),
    TrainingSpec(
        name="hopper_forward",
        target="kernels.attention.training.hopper.forward:HOPPER",
        sm=HOPPER,
        dtypes=frozenset({"bfloat16", "float16"}),
        largest_head_dim=_LARGEST_HEAD_DIM,
        arch_note=HOPPER_PREFILL.arch_note,
        prefill=HOPPER_PREFILL,
        fewest_operations=A_MILLISECOND,
    ),
    TrainingSpec(
        name="portable_backward",
        target="kernels.attention.training.portable.launch:PORTABLE",
        sm=TENSOR_CORES,
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        largest_head_dim=_LARGEST_HEAD_DIM,
        mask_tiles=16,
    ),
    TrainingSpec(
        name="torch_backward",
        target="kernels.attention.training.pytorch:TILED",
        cpu=True,
        dtypes=frozenset({"float64", "float32", "bfloat16", "float16"}),
    ),
)


def select_training(
    q: Tensor, k: Tensor, batch: TrainingBatch, problem: TrainingProblem, arch: GPUArch
) -> TrainingSpec:
    """Return the first row that supports a problem; for the arguments see `TrainingSpec.unsupported`.

    Raises:
        NoKernelError: none does; lists every reason.
    """
    return choose(
        TRAINING_REGISTRY,
        lambda row: row.unsupported(q, k, batch, problem, arch),
        "this attention",
        arch,
    ).spec
