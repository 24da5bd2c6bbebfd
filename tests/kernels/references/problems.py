"""Attention problems with poisoned memory, and the tolerance rule for kernels; for tests and benchmarks."""

from __future__ import annotations

import enum
import itertools
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import kernels
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch, Phase
from kernels.attention.select import Selection
from tests.kernels.references import reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.attention.spec import KernelSpec

UNUSED_BLOCK = (1 << 23) - 1
"""Fills the block table past a sequence's end. Its slots lie outside of any test's cache, but fit 32 bits
for blocks of up to 256 tokens; a larger number would wrap around to an existing slot.
"""

_ROUNDINGS = 8
"""Roundings of a float32 sum by which another order of its terms may change it; the order depends on the processor."""


class Layout(enum.Enum):
    """The order of a sequence's blocks in the cache."""

    CONTIGUOUS = "contiguous"
    """All blocks are adjacent."""
    TWO_RUNS = "two runs"
    """Two runs of adjacent blocks."""
    FRAGMENTED = "fragmented"
    """No two blocks are adjacent."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The attention of one step, with all tensors.

    Attributes:
        problem: shapes and dtypes.
        batch: the sequences.
        q: [T, H, D].
        kv: as in `kernels.prefill_attention`; NaN in every slot that no sequence has written.
        query_lens: query tokens of each sequence.
        seq_lens: keys of each sequence.
    """

    problem: AttentionProblem
    batch: PagedBatch | PackedBatch
    q: Tensor
    kv: Tensor
    query_lens: list[int]
    seq_lens: list[int]

    def keys_and_values(self, seq: int) -> tuple[Tensor, Tensor]:
        """Return a sequence's keys and values, [n, K, D] each."""
        raise NotImplementedError

    def expected(self, dtype: torch.dtype) -> Tensor:
        """Compute the reference [T, H, D] in `dtype`."""
        return torch.cat(
            [
                reference.attention(q, k, v, **self._rules(), dtype=dtype)
                for q, (k, v) in self._sequences()
            ]
        )

    def expected_lse(self, dtype: torch.dtype) -> Tensor:
        """Compute the reference's log-sum-exp [T, H] in `dtype`."""
        return torch.cat(
            [
                reference.log_sum_exp(q, k, **self._rules(), dtype=dtype)
                for q, (k, _) in self._sequences()
            ]
        )

    def cache(self) -> dict[str, Tensor]:
        """Return further keyword arguments of `decode_attention` and `prefill_attention`."""
        return {}

    def _sequences(self) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        for seq, q in enumerate(torch.split(self.q, self.query_lens)):
            yield q, self.keys_and_values(seq)

    def _rules(self) -> dict[str, Any]:
        problem = self.problem
        names = ("softmax_scale", "sliding_window", "softcap", "causal")
        return {name: getattr(problem, name) for name in names}

    def run(self, spec: KernelSpec | None = None) -> Tensor:
        """Run it through the public API, with the given registry row or the selected one."""
        selection = None
        if spec is not None:
            arch = kernels.detect(self.q.device)
            selection = kernels.select(self.problem, arch, registry=(spec,))
        return self.attend(selection)[0]

    def attend(self, selection: Selection | None = None) -> tuple[Tensor, Tensor | None]:
        """Run it through the public API; returns the output, and the log-sum-exp where `problem.lse` is set."""
        plan = kernels.plan_attention(self.problem, self.batch, selection=selection)
        out = torch.full_like(self.q, float("nan"))
        lse = None
        if self.problem.lse:
            lse = torch.full(self.q.shape[:2], float("nan"), device=self.q.device)
        if self.problem.phase is Phase.DECODE:
            kernels.decode_attention(self.q, self.kv, plan, out, lse, **self.cache())
        else:
            kernels.prefill_attention(self.q, self.kv, plan, out, lse, **self.cache())
        return out, lse

    def check(self, out: Tensor) -> None:
        """Compare a kernel's output with the reference by `assert_no_worse_than`."""
        assert_no_worse_than(out, self.expected(truth_dtype(out.dtype)), self.expected(out.dtype))

    def check_lse(self, lse: Tensor) -> None:
        """Compare a kernel's log-sum-exp with the reference; kernels keep it in float32.

        Keys of a quantized cache may be rounded to the queries' dtype after they are scaled.
        """
        truth = self.expected_lse(torch.float64)
        if self.problem.kv_dtype is not None:
            unseen = truth == float("-inf")
            assert torch.equal(lse == float("-inf"), unseen), "rows that see nothing differ"
            same_precision = self.expected_lse(self.q.dtype)
            seen = (x.double().masked_fill(unseen, 0.0) for x in (lse, truth, same_precision))
            assert_no_worse_than(*seen, atol=1e-4)
            return
        torch.testing.assert_close(lse.double(), truth, rtol=1e-5, atol=1e-4)


@dataclass(frozen=True, slots=True)
class PagedCase(AttentionCase):
    """A case whose keys and values lie in the paged cache, [2, N, S, K, D].

    Attributes:
        block_table: block ids of each sequence.
        kv_scale: of a quantized cache, as in `kernels.prefill_attention`; NaN where no token was written.
    """

    batch: PagedBatch
    block_table: list[list[int]]
    kv_scale: Tensor | None = None

    def keys_and_values(self, seq: int) -> tuple[Tensor, Tensor]:
        """Gather a sequence's blocks; in float32 if they are quantized."""
        blocks = self.block_table[seq]
        gathered = self.kv[:, blocks]
        if self.kv_scale is not None:
            gathered = reference.dequantize(gathered, self.kv_scale[:, blocks].transpose(2, 3))
        keys, values = gathered.flatten(1, 2)[:, : self.seq_lens[seq]].unbind(0)
        return keys, values

    def cache(self) -> dict[str, Tensor]:
        """Return `kv_scale` if the cache is quantized."""
        return {} if self.kv_scale is None else {"kv_scale": self.kv_scale}


@dataclass(frozen=True, slots=True)
class PackedCase(AttentionCase):
    """A case whose keys and values are packed, one sequence after the other, [2, T_k, K, D]."""

    batch: PackedBatch

    def keys_and_values(self, seq: int) -> tuple[Tensor, Tensor]:
        """Return views of a sequence's keys and values."""
        start = sum(self.seq_lens[:seq])
        keys, values = self.kv[:, start : start + self.seq_lens[seq]].unbind(0)
        return keys, values


def make_packed_case(
    problem: AttentionProblem,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> PackedCase:
    """Make a problem over packed keys and values, with NaN before and after them.

    Args:
        problem: shapes and dtype; its block size is None.
        query_lens: query tokens of each sequence.
        seq_lens: keys of each sequence.
        seed: of the values.
        device: of all tensors.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, problem.dtype)
    keys, margin = sum(seq_lens), 8
    heads = (problem.num_kv_heads, problem.head_dim)
    around = torch.full((2, keys + 2 * margin, *heads), float("nan"), dtype=dtype)
    kv = around[:, margin : margin + keys]
    kv.copy_(torch.randn(kv.shape, generator=generator))
    q = torch.randn((sum(query_lens), problem.num_heads, problem.head_dim), generator=generator)
    batch = PackedBatch(
        cu_seqlens_q=_offsets(query_lens, device),
        cu_seqlens_k=_offsets(seq_lens, device),
        num_tokens=sum(query_lens),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(seq_lens),
    )
    kv = around.to(device)[:, margin : margin + keys]
    return PackedCase(problem, batch, q.to(device, dtype), kv, query_lens, seq_lens)


def _offsets(lengths: list[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def make_case(
    problem: AttentionProblem,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    layout: Layout = Layout.CONTIGUOUS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    shared_prefix: int = 0,
) -> PagedCase:
    """Make a paged problem whose unused memory is poisoned.

    Args:
        problem: shapes and dtype.
        query_lens: query tokens of each sequence.
        seq_lens: tokens in the cache of each sequence, its queries included.
        layout: order of each sequence's blocks.
        seed: of values and block order.
        device: of all tensors.
        shared_prefix: tokens at the start of every sequence that share their blocks; sequences without
            tokens have none.
    """
    size = problem.block_size
    assert size is not None, "a paged case's problem has a block size"
    needed = [-(-length // size) for length in seq_lens]
    tables = _place(needed, layout, random.Random(seed))
    shared = shared_prefix // size
    for table in tables:
        if table:
            table[:shared] = tables[0][:shared]
    num_blocks = 2 + max((block for table in tables for block in table), default=0)
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, problem.dtype)
    heads = (problem.num_kv_heads, problem.head_dim)
    kv = torch.full((2, num_blocks, size, *heads), float("nan"), dtype=dtype)
    for length, table in zip(seq_lens, tables, strict=True):
        for index, block in enumerate(table):
            used = min(size, length - index * size)
            kv[:, block, :used] = torch.randn((2, used, *heads), generator=generator).to(dtype)
    kv_scale = None
    if problem.kv_dtype is not None:
        kv, kv_scale = _quantized(kv, generator)
        kv_scale = kv_scale.to(device)
    shape = (sum(query_lens), problem.num_heads, problem.head_dim)
    width = max(1, *needed)
    padded = [table + [UNUSED_BLOCK] * (width - len(table)) for table in tables]
    batch = PagedBatch(
        cu_seqlens_q=_offsets(query_lens, device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=torch.tensor(padded, dtype=torch.int32, device=device),
        num_tokens=sum(query_lens),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(seq_lens),
        shared_prefix=shared_prefix,
    )
    q = torch.randn(shape, generator=generator).to(device, dtype)
    return PagedCase(problem, batch, q, kv.to(device), query_lens, seq_lens, tables, kv_scale)


def _quantized(kv: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Quantize a cache whose unwritten slots are NaN, after scaling its rows by factors from 2^-6 to 2^6."""
    sizes = torch.randint(-6, 7, kv.shape[:-1], generator=generator).exp2()
    # The full range is for values only: with such keys, one key would have all the weight.
    sizes[0] = sizes[0].sqrt().clamp(0.5, 2)
    numbers, scale = reference.quantize_kv(kv.float() * sizes[..., None])
    scale = torch.where(kv[..., 0].isnan(), float("nan"), scale)
    return numbers, scale.transpose(2, 3).contiguous()


def _place(needed: list[int], layout: Layout, order: random.Random) -> list[list[int]]:
    """Give each sequence its block ids, with unused blocks between sequences."""
    total = sum(needed)
    if layout is Layout.FRAGMENTED:
        # Only odd ids, so that no two blocks are adjacent; shuffled, so that the ids do not ascend.
        free = [2 * index + 1 for index in range(total)]
        order.shuffle(free)
        return [[free.pop() for _ in range(count)] for count in needed]
    tables: list[list[int]] = []
    cursor = 1
    for count in needed:
        head = count // 2 if layout is Layout.TWO_RUNS else 0
        # The first run lies after the second, so that ids descend once.
        second = list(range(cursor, cursor + count - head))
        first = list(range(cursor + count - head + 1, cursor + count + 1)) if head else []
        tables.append(first + second)
        cursor += count + 2
    return tables


def truth_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that is used as exact when a kernel computes in `dtype`."""
    return torch.float64 if dtype is torch.float32 else torch.float32


def assert_no_worse_than(
    out: Tensor, truth: Tensor, same_precision: Tensor, *, factor: float = 2.0, atol: float = 1e-5
) -> None:
    """Assert that err(out) <= factor * err(same precision) + slack, with err the largest absolute error.

    Args:
        out: the kernel's result.
        truth: the reference in higher precision.
        same_precision: the reference in the kernel's own precision.
        factor: how many times larger the error may be than that of plain PyTorch in the same precision.
        atol: slack, for problems on which plain PyTorch happens to be exact. For large values the slack grows, so that
            float32 sums may be added in any order.

    Raises:
        AssertionError: the error is larger, the shapes differ, or a value is not finite.

    Source: the rule of the FlashAttention tests.
    """
    if out.shape != truth.shape:
        raise AssertionError(f"shape {list(out.shape)}, expected {list(truth.shape)}")
    if not bool(torch.isfinite(out).all()):
        bad = int((~torch.isfinite(out)).sum())
        raise AssertionError(f"{bad} of {out.numel()} values are not finite")
    error = _largest(out.to(truth.dtype) - truth)
    slack = max(atol, _ROUNDINGS * torch.finfo(torch.float32).eps * _largest(truth))
    allowed = factor * _largest(same_precision.to(truth.dtype) - truth) + slack
    # Not `error > allowed`, which is never true for a NaN reference.
    if not error <= allowed < math.inf:
        raise AssertionError(f"largest error {error:.3g}, allowed {allowed:.3g}")


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0
