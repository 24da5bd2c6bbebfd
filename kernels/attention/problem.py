"""The attention problem, which determines the kernel, and the batch of one step, to which a kernel is bound."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.errors import ShapeError
from kernels.weight_format import FP8_ROWS, SCALE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (FP8_ROWS.dtype,)
"""Dtypes of a quantized cache; an unquantized cache has the queries' dtype."""


class Phase(enum.Enum):
    """The phase of a problem; each phase has its own kernels.

    Example:
        >>> Phase("decode") is Phase.DECODE
        True
    """

    PREFILL = "prefill"
    """Any number of query tokens per sequence."""
    DECODE = "decode"
    """One query token per sequence, or a few."""


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """The properties of attention that are constant from step to step. They determine the kernel.

    Attributes:
        phase: prefill or decode.
        dtype: dtype of queries and output, and of the cache unless `kv_dtype` is given: "float32",
            "bfloat16" or "float16".
        num_heads: query heads H.
        num_kv_heads: key-value heads K; divides H.
        head_dim: D, elements.
        block_size: S, tokens per cache block; None for packed keys and values, without blocks.
        softmax_scale: factor on the scores before the softmax, above 0.
        sliding_window: tokens that a query attends to, itself included; None for all.
        softcap: c in c * tanh(score / c), applied to the scaled scores; None for none.
        causal: whether a query attends only to keys up to its own token. A decode with False is the
            attention to the tokens that all sequences share (`PagedBatch.shared_prefix`).
        max_query_tokens: most query tokens of a sequence in a decode: 1, or more for speculation.
        lse: whether the call also writes the log-sum-exp of the scores.
        batch_invariant: whether the result of a query must have the same bits in every batch, however its
            sequence is cut into chunks, and in a prefill as in a decode.
        kv_dtype: dtype of a quantized paged cache: "float8_e4m3fn"; None for a cache of `dtype`. A prefill
            may then multiply in that dtype.
        unmeasured: whether rows may be chosen that no GPU has timed for it (`KernelSpec.measured`).

    Raises:
        ShapeError: a value is out of its range.

    Example:
        >>> problem = AttentionProblem(
        ...     Phase.DECODE, "bfloat16", num_heads=32, num_kv_heads=8, head_dim=128, block_size=16,
        ...     softmax_scale=128**-0.5,
        ... )
        >>> print(problem)
        decode bfloat16 H=32 K=8 D=128 S=16
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
    kv_dtype: str | None = None
    unmeasured: bool = False

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
        """Dtype of keys and values in memory."""
        return self.kv_dtype or self.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's key or value in the cache, its scale included."""
        if self.kv_dtype is not None:
            return self.head_dim + SCALE_BYTES
        return self.head_dim * (4 if self.dtype == "float32" else 2)

    def __str__(self) -> str:
        """Return one line for logs and error messages."""
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
            (self.unmeasured, "unmeasured allowed"),
        ):
            text += f" {word}" if shown else ""
        return text


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The query tokens of one step and the cache blocks that they attend to.

    Attributes:
        cu_seqlens_q: [B + 1] int32; query rows of sequence b start at cu_seqlens_q[b].
        seq_lens: [B] int32; tokens in the cache, this step's included.
        block_table: [B, M] int32; entries at or past ceil(seq_len / S) are never read, nor are
            blocks before every query's window.
        num_tokens: T, query rows of all sequences; the last of `cu_seqlens_q`, or more if the step is padded.
        max_seqlen_q: most query tokens of a sequence, or an upper bound.
        max_seqlen_k: largest of `seq_lens`, or an upper bound.
        shared_prefix: tokens at the start of every sequence that are in the same blocks, a multiple of S. A decode then
            reads them once; results differ by rounding only. All query tokens come after them. Empty sequences are
            allowed, except as the first. A captured CUDA graph keeps the value it was captured with.
        keys_settled: whether a decode may read keys, values and this batch before the preceding kernel
            has ended, except the keys and values of the query tokens. The caller guarantees that they and
            the plan were written before the stream's last launch that was not a programmatic dependent
            launch (`kernels.gpu.dependent_launch`).

    Example:
        >>> batch = PagedBatch(  # one new token of a sequence of 20, in blocks 3 and 0
        ...     cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        ...     seq_lens=torch.tensor([20], dtype=torch.int32),
        ...     block_table=torch.tensor([[3, 0]], dtype=torch.int32),
        ...     num_tokens=1, max_seqlen_q=1, max_seqlen_k=20,
        ... )
        >>> batch.num_seqs
        1
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
    """A `PagedBatch` whose keys and values are packed, one sequence after the other.

    Attributes:
        cu_seqlens_q: [B + 1] int32; query rows of sequence b start at cu_seqlens_q[b].
        cu_seqlens_k: [B + 1] int32; its keys and values start at cu_seqlens_k[b].
        num_tokens: T, query rows of all sequences.
        max_seqlen_q: most query tokens of a sequence, or an upper bound.
        max_seqlen_k: most keys of a sequence, or an upper bound.

    Example:
        >>> starts = torch.tensor([0, 7, 10], dtype=torch.int32)  # sequences of 7 and 3 tokens
        >>> PackedBatch(starts, starts, num_tokens=10, max_seqlen_q=7, max_seqlen_k=7).num_seqs
        2
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
