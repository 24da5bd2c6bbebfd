"""The attention problem, the rows that may solve it, and the pure choice between them.

Knows nothing of devices beyond `GPUArch`, and nothing of how a kernel is written.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kernels.attention.quantized_cache import KV_DTYPES, SCALE_BYTES
from kernels.errors import NoKernelError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from kernels.arch import GPUArch
    from kernels.attention.spec import KernelSpec

DTYPES = ("float32", "bfloat16", "float16")


class Phase(enum.Enum):
    """Which of the two attention kernels a problem needs."""

    PREFILL = "prefill"
    """Any number of query tokens per sequence."""
    DECODE = "decode"
    """One query token per sequence, or a few."""


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """What stays the same from step to step, and so decides the kernel.

    Attributes:
        phase: prefill or decode.
        dtype: of queries and output, and of the cache unless `kv_dtype` says otherwise: "float32",
            "bfloat16" or "float16".
        num_heads: query heads H.
        num_kv_heads: key-value heads K; divides H.
        head_dim: D, elements.
        block_size: S, tokens per cache block; None where keys and values lie packed, without blocks.
        softmax_scale: factor on the scores before the softmax, above 0.
        sliding_window: tokens that a query attends to, itself included; None for all.
        softcap: c in c * tanh(score / c), applied to the scaled scores; None for none.
        causal: whether a query sees no key after its own token; in a decode it does not only where it
            stands for the tokens that all sequences share (`PagedBatch.shared_prefix`).
        max_query_tokens: most query tokens of a sequence in a decode: 1, or more for speculation.
        lse: whether the call also writes the log-sum-exp of the scores.
        batch_invariant: whether a sequence's result must be bitwise the same whatever shares its
            batch; costs some speed where few sequences are decoded.
        fp8: whether a prefill may multiply in FP8: faster, less exact. A permission: rows that do not
            multiply in FP8 take such a problem too, and rows that do take no other.
        kv_dtype: of a quantised paged cache: "float8_e4m3fn"; None for one of `dtype`.

    Raises:
        ShapeError: a value is out of its range.
    """

    phase: Phase
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int | None
    softmax_scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    causal: bool = True
    max_query_tokens: int = 1
    lse: bool = False
    batch_invariant: bool = False
    fp8: bool = False
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ShapeError(f"dtype is {self.dtype!r}; attention takes one of {', '.join(DTYPES)}")
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise ShapeError(
                f"kv_dtype is {self.kv_dtype!r}; it must be None or one of {', '.join(KV_DTYPES)}"
            )
        if self.kv_dtype is not None and self.block_size is None:
            raise ShapeError(
                f"packed keys and values have no scales; kv_dtype is {self.kv_dtype!r}"
            )
        for field in ("num_heads", "num_kv_heads", "head_dim", "block_size", "max_query_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ShapeError(f"{field} is {value}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ShapeError(
                f"sliding_window is {self.sliding_window}; it must be at least 1 token"
            )
        for field in ("softcap", "softmax_scale"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ShapeError(f"{field} is {value}; it must be above 0 and finite")
        if self.phase is Phase.DECODE and self.block_size is None:
            raise ShapeError("decode attends to a paged cache; it needs a block_size")

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cache_dtype(self) -> str:
        """Of keys and values as they lie in memory."""
        return self.kv_dtype or self.dtype

    @property
    def row_bytes(self) -> int:
        """Of a key or a value of one head in the cache, its scale included."""
        if self.kv_dtype is not None:
            return self.head_dim + SCALE_BYTES
        return self.head_dim * (4 if self.dtype == "float32" else 2)

    def __str__(self) -> str:
        """One line for logs and error messages."""
        text = (
            f"{self.phase.value} {self.dtype} H={self.num_heads} K={self.num_kv_heads} "
            f"D={self.head_dim} "
        )
        text += "packed" if self.block_size is None else f"S={self.block_size}"
        for shown, word in (
            (self.kv_dtype is not None, f"kv={self.kv_dtype}"),
            (self.sliding_window is not None, f"window={self.sliding_window}"),
            (self.softcap is not None, f"softcap={self.softcap}"),
            (not self.causal, "not causal"),
            (self.max_query_tokens > 1, f"queries={self.max_query_tokens}"),
            (self.lse, "lse"),
            (self.batch_invariant, "batch invariant"),
            (self.fp8, "fp8"),
        ):
            text += f" {word}" if shown else ""
        return text


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """What changes from step to step: which tokens attend to which blocks.

    Attributes:
        cu_seqlens_q: [B + 1] int32; query rows of sequence b start at cu_seqlens_q[b].
        seq_lens: [B] int32; tokens in the cache, this step's included.
        block_table: [B, M] int32; entries at or past ceil(seq_len / S) are never read, nor are the
            blocks whose tokens no query's window reaches.
        num_tokens: T, query rows of all sequences; the last of `cu_seqlens_q`, or above it where
            rows pad the step.
        max_seqlen_q: most query tokens of a sequence, or an upper bound of it.
        max_seqlen_k: largest of `seq_lens`, or an upper bound of it.
        shared_prefix: tokens at the start of every sequence that lie in the same blocks, a multiple
            of S; a promise that lets a decode read them once, and changes no result beyond rounding.
            All query tokens lie behind them; sequences without tokens may be among the others, but
            not first. A captured graph keeps the number that it was captured with.
        keys_settled: whether a decode may read keys, values and this batch before it waits for the kernel
            before it, all but the keys and values of the query tokens. A promise: they, and the plan, were
            made before the stream's last launch that was not programmatic (`kernels.gpu.dependent_launch`).
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_table: Tensor
    num_tokens: int
    max_seqlen_q: int
    max_seqlen_k: int
    shared_prefix: int = 0
    keys_settled: bool = False

    @property
    def num_seqs(self) -> int:
        """B."""
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Like `PagedBatch`, where keys and values lie packed one sequence after the other.

    Attributes:
        cu_seqlens_q: [B + 1] int32; query rows of sequence b start at cu_seqlens_q[b].
        cu_seqlens_k: [B + 1] int32; its keys and values start at cu_seqlens_k[b].
        num_tokens: T, query rows of all sequences.
        max_seqlen_q: most query tokens of a sequence, or an upper bound of it.
        max_seqlen_k: most keys of a sequence, or an upper bound of it.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    num_tokens: int
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def num_seqs(self) -> int:
        """B."""
        return self.cu_seqlens_k.shape[0] - 1


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Tile sizes of a compiled kernel.

    Attributes:
        block_m: query rows per tile; a row is one query head of one token.
        block_n: keys per tile.
        num_warps: warps per thread block; of each role where a kernel gives its warps several.
        num_stages: tiles in flight.
        programs_per_sm: thread blocks that the split plan of a decode aims at, per SM.
        one_loop: whether a prefill masks every tile, which saves a second loop's start.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    one_loop: bool = False


@dataclass(frozen=True, slots=True)
class TunedLaunch:
    """A row of a tuning table.

    Attributes:
        launch: the tile sizes.
        max_seqlen_k: for sequences of at most this many keys; None for any length.
        provenance: where the numbers come from, for people.
        measured: whether they were chosen by timing on this architecture.
        min_num_seqs: for steps of at least so many sequences.
    """

    launch: LaunchConfig
    max_seqlen_k: int | None
    provenance: str
    measured: bool
    min_num_seqs: int = 0


class AttentionKernel(Protocol):
    """One row's kernel, bound to the batch of one step and run once per layer."""

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write the attention of `q` over `kv` to `out`; shapes as in the door.

        A decode on a GPU also takes a float32 `out`, whatever the problem's dtype: it is merged then.
        """


class AttentionKernelFactory(Protocol):
    """What `KernelSpec.target` names: makes a kernel for the batch of one step."""

    def __call__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> AttentionKernel:
        """Do the work of a step that all layers share."""


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
        arch: where it runs.
        launches: its tile sizes, those for the most sequences first, then the shortest; empty where it has none.
        why: one sentence for people.
        refusals: the more preferred rows of this phase, each with all of its reasons.
    """

    spec: KernelSpec
    arch: GPUArch
    launches: tuple[TunedLaunch, ...]
    why: str
    refusals: tuple[Refusal, ...]

    def launch_for(self, max_seqlen_k: int, num_seqs: int) -> LaunchConfig:
        """Return the tile sizes for so many sequences of at most `max_seqlen_k` keys."""
        return self.tuned_for(max_seqlen_k, num_seqs).launch

    def tuned_for(self, max_seqlen_k: int, num_seqs: int) -> TunedLaunch:
        """Return the same with where they come from."""
        for row in self.launches:
            long_enough = row.max_seqlen_k is None or max_seqlen_k <= row.max_seqlen_k
            if long_enough and num_seqs >= row.min_num_seqs:
                return row
        raise AssertionError(f"{self.spec.name} has no launch for {max_seqlen_k} keys")


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A kernel bound to one step's batch; every layer of the step reuses it.

    Attributes:
        problem: what was asked.
        selection: the row and why.
        run: the bound kernel.
        q_shape: (T, H, D) that queries and output must have.
        kv_shape: (S, K, D) that the cache's blocks must have; (K, D) of packed keys and values.
        dtype: of queries and output.
        kv_dtype: of the cache.
        device: of these, and of the batch.
        prefix: the row that reads what the sequences share, where that is done once for all.
    """

    problem: AttentionProblem
    selection: Selection
    run: AttentionKernel
    q_shape: tuple[int, int, int]
    kv_shape: tuple[int, ...]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    prefix: Selection | None = None


def select(
    problem: AttentionProblem,
    arch: GPUArch,
    registry: Sequence[KernelSpec],
    launches: Callable[[KernelSpec, AttentionProblem, GPUArch], tuple[TunedLaunch, ...]],
) -> Selection:
    """Choose the first row that accepts the problem.

    Args:
        problem: what is to be solved.
        arch: where.
        registry: rows, most preferred first.
        launches: looks up a row's tile sizes, in the order of `Selection.launches`.

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
            why = f"{why}; {spec.note}" if spec.note else why
            tuned = launches(spec, problem, arch) if spec.launch else ()
            return Selection(spec, arch, tuned, why, passed)
        refusals.append(Refusal(spec.name, reasons))
    lines = "".join(f"\n  {refusal}" for refusal in refusals)
    raise NoKernelError(f"no kernel for {problem} on {arch}:{lines or ' the registry is empty'}")
