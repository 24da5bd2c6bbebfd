"""The attention problem, the rows that may solve it, and the pure choice between them.

Knows nothing of devices beyond `GPUArch`, and nothing of how a kernel is written.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kernels.errors import NoKernelError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from kernels.arch import GPUArch

DTYPES = ("float32", "bfloat16", "float16")


class Phase(enum.Enum):
    """Which of the two attention kernels a problem needs."""

    PREFILL = "prefill"
    """Any number of query tokens per sequence."""
    DECODE = "decode"
    """Exactly one query token per sequence."""


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """What stays the same from step to step, and so decides the kernel.

    Attributes:
        phase: prefill or decode.
        dtype: of queries, cache and output: "float32", "bfloat16" or "float16".
        num_heads: query heads H.
        num_kv_heads: key-value heads K; divides H.
        head_dim: D, elements.
        block_size: S, tokens per cache block.
        softmax_scale: factor on the scores before the softmax.
        sliding_window: tokens that a query attends to, itself included; None for all.
        softcap: c in c * tanh(score / c), applied to the scaled scores; None for none.

    Raises:
        ShapeError: a value is out of its range.
    """

    phase: Phase
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    softmax_scale: float
    sliding_window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ShapeError(f"dtype is {self.dtype!r}; attention takes one of {', '.join(DTYPES)}")
        for field in ("num_heads", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, field) < 1:
                raise ShapeError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ShapeError(
                f"sliding_window is {self.sliding_window}; it must be at least 1 token"
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ShapeError(f"softcap is {self.softcap}; it must be above 0")

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        """One line for logs and error messages."""
        text = (
            f"{self.phase.value} {self.dtype} H={self.num_heads} K={self.num_kv_heads} "
            f"D={self.head_dim} S={self.block_size}"
        )
        if self.sliding_window is not None:
            text += f" window={self.sliding_window}"
        return text if self.softcap is None else f"{text} softcap={self.softcap:g}"


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """What changes from step to step: which tokens attend to which blocks.

    Attributes:
        cu_seqlens_q: [B + 1] int32; query rows of sequence b start at cu_seqlens_q[b].
        seq_lens: [B] int32; tokens in the cache, this step's included.
        block_table: [B, M] int32; entries at or past ceil(seq_len / S) are never read.
        max_seqlen_q: most query tokens of a sequence.
        max_seqlen_k: largest of `seq_lens`, or an upper bound of it.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Tile sizes of a compiled kernel.

    Attributes:
        block_m: query rows per tile.
        block_n: keys per tile.
        num_warps: warps per thread block.
        num_stages: tiles in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class AttentionKernel(Protocol):
    """One row's kernel, bound to the batch of one step and run once per layer."""

    def __call__(self, q: Tensor, kv: Tensor, out: Tensor) -> None:
        """Write the attention of `q` [T, H, D] over `kv` [2, N, S, K, D] to `out` [T, H, D]."""


class AttentionKernelFactory(Protocol):
    """What `KernelSpec.target` names: makes a kernel for the batch of one step."""

    def __call__(
        self, problem: AttentionProblem, batch: PagedBatch, launch: LaunchConfig | None
    ) -> AttentionKernel:
        """Do the work of a step that all layers share."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One row of the registry: what a kernel accepts, and where it lives.

    Attributes:
        name: unique; shown in logs, metrics and results.
        phase: the phase it solves.
        target: "module:attribute" of its `AttentionKernelFactory`; imported when first used, so
            that a host without a GPU compiler can read every row.
        dtypes: accepted dtypes.
        cpu: whether it runs on a CPU.
        sm: lowest and highest compute capability, both included; None for no GPU.
        head_dims: accepted head dims; None for any.
        block_multiple: the cache's block size must be a multiple of this many tokens.
        max_group_size: most query heads per key-value head; None for any.
        sliding_window: whether it can limit attention to a window.
        softcap: whether it can cap scores.
        launch: its safe default; None where there is nothing to launch.
        note: what a reader of the plan should know about this row.
    """

    name: str
    phase: Phase
    target: str
    dtypes: frozenset[str]
    cpu: bool = False
    sm: tuple[int, int] | None = None
    head_dims: frozenset[int] | None = None
    block_multiple: int = 1
    max_group_size: int | None = None
    sliding_window: bool = True
    softcap: bool = True
    launch: LaunchConfig | None = None
    note: str = ""

    def refuse(self, problem: AttentionProblem, arch: GPUArch) -> tuple[str, ...]:
        """List every reason why this row cannot solve `problem` on `arch`; empty if it can."""
        group = problem.group_size
        tests = (
            (problem.phase is not self.phase, f"solves {self.phase.value} only"),
            (not self._runs_on(arch), self._arch_reason(arch)),
            (problem.dtype not in self.dtypes, f"no {problem.dtype}"),
            (
                self.head_dims is not None and problem.head_dim not in self.head_dims,
                f"head_dim {problem.head_dim} is not one of {sorted(self.head_dims or ())}",
            ),
            (
                problem.block_size % self.block_multiple != 0,
                f"block_size {problem.block_size} is not a multiple of {self.block_multiple}",
            ),
            (
                self.max_group_size is not None and group > self.max_group_size,
                f"{group} query heads per key-value head, at most {self.max_group_size}",
            ),
            (problem.sliding_window is not None and not self.sliding_window, "no sliding window"),
            (problem.softcap is not None and not self.softcap, "no softcap"),
        )
        return tuple(reason for refused, reason in tests if refused)

    def _runs_on(self, arch: GPUArch) -> bool:
        if arch.is_cpu:
            return self.cpu
        return self.sm is not None and self.sm[0] <= arch.sm <= self.sm[1]

    def _arch_reason(self, arch: GPUArch) -> str:
        if arch.is_cpu:
            return "needs a GPU"
        if self.sm is None:
            return "runs on the CPU only"
        return f"needs sm_{self.sm[0]} to sm_{self.sm[1]}, this is sm_{arch.sm}"


class Refusal(NamedTuple):
    """Why one row was passed over."""

    kernel: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """One line for logs and error messages."""
        return f"{self.kernel}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The row chosen for a problem, and how the choice came about.

    Attributes:
        spec: the row.
        launch: its tile sizes; None where there is nothing to launch.
        why: one sentence for people.
        refusals: the more preferred rows of this phase, each with all of its reasons.
    """

    spec: KernelSpec
    launch: LaunchConfig | None
    why: str
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A kernel bound to one step's batch; every layer of the step reuses it.

    Attributes:
        problem: what was asked.
        selection: the row and why.
        run: the bound kernel.
        q_shape: (T, H, D) that queries and output must have.
        block_shape: (S, K, D) that the cache's blocks must have.
        dtype: of queries, cache and output.
    """

    problem: AttentionProblem
    selection: Selection
    run: AttentionKernel
    q_shape: tuple[int, int, int]
    block_shape: tuple[int, int, int]
    dtype: torch.dtype


def select(problem: AttentionProblem, arch: GPUArch, registry: Sequence[KernelSpec]) -> Selection:
    """Choose the first row that accepts the problem.

    Args:
        problem: what is to be solved.
        arch: where.
        registry: rows, most preferred first.

    Returns:
        The row, with what the rows before it refused.

    Raises:
        NoKernelError: every row refuses; the message has a line for each.
    """
    refusals: list[Refusal] = []
    for spec in registry:
        reasons = spec.refuse(problem, arch)
        if not reasons:
            passed = tuple(
                r for r, row in zip(refusals, registry, strict=False) if row.phase is spec.phase
            )
            why = f"{spec.name} is the first row that accepts {problem} on {arch}"
            return Selection(spec, spec.launch, f"{why}; {spec.note}" if spec.note else why, passed)
        refusals.append(Refusal(spec.name, reasons))
    lines = "".join(f"\n  {refusal}" for refusal in refusals)
    raise NoKernelError(f"no kernel for {problem} on {arch}:{lines or ' the registry is empty'}")
