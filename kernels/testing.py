"""Paged attention problems with poisoned memory, and the rule for how exact a kernel must be.

Shared by tests and benchmarks. Knows the registry's rows only through the door's shapes.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from kernels import reference
from kernels.plan import AttentionProblem, KernelSpec, PagedBatch, Phase

UNUSED_BLOCK = 1 << 28
"""Fills the block table past a sequence's end: reading it is out of any cache's range."""


class Layout(enum.Enum):
    """How the blocks of a sequence lie in the cache."""

    CONTIGUOUS = "contiguous"
    """All next to each other."""
    TWO_RUNS = "two runs"
    """In two pieces."""
    FRAGMENTED = "fragmented"
    """No two next to each other."""


@dataclass(frozen=True, slots=True)
class PagedCase:
    """One step's attention, ready to run.

    Attributes:
        problem: what stays the same.
        batch: the sequences.
        q: [T, H, D].
        kv: [2, N, S, K, D]; NaN in every slot that no sequence has written.
        query_lens: query tokens of each sequence.
        seq_lens: tokens in the cache of each sequence.
        block_table: block ids of each sequence.
    """

    problem: AttentionProblem
    batch: PagedBatch
    q: Tensor
    kv: Tensor
    query_lens: list[int]
    seq_lens: list[int]
    block_table: list[list[int]]

    def expected(self, dtype: torch.dtype) -> Tensor:
        """Compute the reference in `dtype`."""
        return reference.paged_attention(
            self.q,
            self.kv,
            self.query_lens,
            self.seq_lens,
            self.block_table,
            self.problem,
            dtype,
        )

    def run(self, spec: KernelSpec | None = None) -> Tensor:
        """Run it through the door, on the given row or on the registry's choice."""
        selection = None
        if spec is not None:
            arch = kernels.detect(self.q.device)
            selection = kernels.select(self.problem, arch, registry=(spec,))
        plan = kernels.plan_attention(self.problem, self.batch, selection=selection)
        out = torch.full_like(self.q, float("nan"))
        if self.problem.phase is Phase.DECODE:
            kernels.decode_attention(self.q, self.kv, plan, out)
        else:
            kernels.prefill_attention(self.q, self.kv, plan, out)
        return out

    def check(self, out: Tensor) -> None:
        """Compare a kernel's output with the reference by `assert_no_worse_than`."""
        assert_no_worse_than(out, self.expected(truth_dtype(out.dtype)), self.expected(out.dtype))


def make_case(
    problem: AttentionProblem,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    layout: Layout = Layout.CONTIGUOUS,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> PagedCase:
    """Make a paged problem whose unused memory is poisoned.

    Args:
        problem: shapes and dtype.
        query_lens: query tokens of each sequence.
        seq_lens: tokens in the cache of each sequence, its queries included.
        layout: how each sequence's blocks lie.
        seed: of values and block order.
        device: of all tensors.
    """
    size = problem.block_size
    needed = [-(-length // size) for length in seq_lens]
    tables = _place(needed, layout, random.Random(seed))  # noqa: S311
    num_blocks = 2 + max((block for table in tables for block in table), default=0)
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, problem.dtype)
    heads = (problem.num_kv_heads, problem.head_dim)
    kv = torch.full((2, num_blocks, size, *heads), float("nan"), dtype=dtype)
    for length, table in zip(seq_lens, tables, strict=True):
        for index, block in enumerate(table):
            used = min(size, length - index * size)
            kv[:, block, :used] = torch.randn((2, used, *heads), generator=generator).to(dtype)
    shape = (sum(query_lens), problem.num_heads, problem.head_dim)
    width = max(1, *needed)
    padded = [table + [UNUSED_BLOCK] * (width - len(table)) for table in tables]
    offsets = [sum(query_lens[:index]) for index in range(len(query_lens) + 1)]
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=torch.tensor(padded, dtype=torch.int32, device=device),
        num_tokens=sum(query_lens),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(seq_lens),
    )
    q = torch.randn(shape, generator=generator).to(device, dtype)
    return PagedCase(problem, batch, q, kv.to(device), query_lens, seq_lens, tables)


def _place(needed: list[int], layout: Layout, order: random.Random) -> list[list[int]]:
    """Give each sequence its block ids, with unused blocks between sequences."""
    total = sum(needed)
    if layout is Layout.FRAGMENTED:
        # Odd ids only, so that no two are neighbours; shuffled, so that they do not ascend.
        free = [2 * index + 1 for index in range(total)]
        order.shuffle(free)
        return [[free.pop() for _ in range(count)] for count in needed]
    tables: list[list[int]] = []
    cursor = 1
    for count in needed:
        head = count // 2 if layout is Layout.TWO_RUNS else 0
        # The first piece lies behind the second, so that ids descend once.
        second = list(range(cursor, cursor + count - head))
        first = list(range(cursor + count - head + 1, cursor + count + 1)) if head else []
        tables.append(first + second)
        cursor += count + 2
    return tables


def truth_dtype(dtype: torch.dtype) -> torch.dtype:
    """Name the precision that counts as exact beside `dtype`."""
    return torch.float64 if dtype is torch.float32 else torch.float32


def assert_no_worse_than(
    out: Tensor, truth: Tensor, same_precision: Tensor, *, factor: float = 2.0, atol: float = 1e-5
) -> None:
    """Demand err(out) <= factor * err(same precision) + atol, in the largest absolute error.

    Args:
        out: what the kernel computed.
        truth: the reference in higher precision.
        same_precision: the reference in the kernel's own precision.
        factor: how much worse than plain PyTorch of that precision a kernel may be.
        atol: absolute slack, for problems on which plain PyTorch happens to be exact.

    Raises:
        AssertionError: the error is larger, or a value is not finite.

    Source: the rule of the FlashAttention tests.
    """
    if out.shape != truth.shape:
        raise AssertionError(f"shape {list(out.shape)}, expected {list(truth.shape)}")
    if not bool(torch.isfinite(out).all()):
        bad = int((~torch.isfinite(out)).sum())
        raise AssertionError(f"{bad} of {out.numel()} values are not finite")
    error = _largest(out.to(truth.dtype) - truth)
    allowed = factor * _largest(same_precision.to(truth.dtype) - truth) + atol
    if error > allowed:
        raise AssertionError(f"largest error {error:.3g}, allowed {allowed:.3g}")


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0
