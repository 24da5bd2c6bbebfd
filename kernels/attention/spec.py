"""A row of the registry: what a kernel supports, and its reasons for not supporting a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kernels.arch import NEVER_RUN, NOT_ALLOWED, GPUArch
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch, Phase
from kernels.attention.splits import sequences_of_part
from kernels.cpu.library import load

if TYPE_CHECKING:
    from kernels.attention.launch import LaunchConfig

_MOST_PARTS: Final = 8


@dataclass(frozen=True, slots=True)
class QuantizedCache:
    """The quantized caches that a kernel reads.

    Attributes:
        kv_dtypes: supported dtypes of the cache.
        dtypes: supported dtypes of the queries over such a cache.
        sm: compute capabilities on which it reads such a cache; None for all that the kernel runs on.
        note: what other GPUs lack; part of the reason.
    """

    kv_dtypes: frozenset[str]
    dtypes: frozenset[str]
    sm: frozenset[int] | None = None
    note: str = ""

    def unsupported(self, problem: AttentionProblem, arch: GPUArch) -> tuple[str, ...]:
        """List every reason why the cache of a problem that has a `kv_dtype` cannot be read."""
        reasons = []
        if problem.kv_dtype not in self.kv_dtypes:
            reasons.append(f"no {problem.kv_dtype} cache")
        if problem.dtype not in self.dtypes:
            reasons.append(f"no {problem.dtype} queries over a {problem.kv_dtype} cache")
        if self.sm is not None and not arch.is_cpu:
            needs = arch.unsupported(self.sm, self.note)
            reasons += [f"a {problem.kv_dtype} cache {reason}" for reason in needs]
        return tuple(reasons)


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One row of the registry: what a kernel supports, and where it lives.

    Attributes:
        name: unique; shown in logs, metrics and results.
        phase: the phase it solves.
        target: "module:attribute" of its `AttentionKernelFactory`; imported on first use, so that a
            host without Triton can read every row.
        dtypes: supported dtypes.
        cpu: whether it runs on a CPU.
        in_library: whether it is in the C library for CPUs, which has builds for some processors.
        sm: compute capabilities of the GPUs it runs on; None for every GPU, an empty set for none.
        flash_attention: the FlashAttention generation whose algorithm it follows; None for PyTorch's own attention.
        head_dims: supported head dims; None for any.
        block_sizes: smallest and largest block size, both included; None for any.
        power_of_two_blocks: whether a block size must be a power of two.
        group_sizes: supported numbers of query heads per key-value head; None for any.
        paged: whether it reads a cache in blocks.
        packed: whether it reads packed keys and values.
        sliding_window: whether it can limit attention to a window.
        softcap: whether it can cap scores.
        non_causal: whether it supports queries that see keys after their own token.
        several_queries: whether a decode may have more than one query token per sequence.
        lse: whether it can write the log-sum-exp.
        batch_invariant: whether the bits of a query's result depend on nothing but its sequence.
        quantized_only: whether it reads only quantized caches.
        fewest_keys: keys of a step's longest sequence from which it is chosen.
        copied_bytes: bytes of a number of the keys and values that it copies to a buffer first
            (`kernels.attention.splits`); 0 if it reads the cache in place.
        measured: pairs of a head dim and a number of query heads per key-value head for which a GPU has timed it, empty
            if no GPU has ever run it; other problems must allow unmeasured kernels. None for all.
        row_tiles: supported values of `block_m`; None for any power of two.
        quantized: the quantized caches it reads; None for none.
        tuned_as: the row whose tile sizes it has; None for its own.
        launch: default tile sizes, which work on every GPU that it runs on; `kernels/tuning` has better
            ones. None for a PyTorch row.
        note: a remark about this row, shown in the plan.
        arch_note: what other architectures lack; part of the reason.
    """

    name: str
    phase: Phase
    target: str
    dtypes: frozenset[str]
    cpu: bool = False
    in_library: bool = False
    sm: frozenset[int] | None = frozenset()
    flash_attention: int | None = None
    head_dims: frozenset[int] | None = None
    block_sizes: tuple[int, int] | None = None
    power_of_two_blocks: bool = False
    group_sizes: frozenset[int] | None = None
    paged: bool = True
    packed: bool = False
    sliding_window: bool = True
    softcap: bool = True
    non_causal: bool = False
    several_queries: bool = False
    lse: bool = False
    batch_invariant: bool = False
    quantized_only: bool = False
    fewest_keys: int = 0
    copied_bytes: int = 0
    measured: frozenset[tuple[int, int]] | None = None
    row_tiles: frozenset[int] | None = None
    quantized: QuantizedCache | None = None
    tuned_as: str | None = None
    launch: LaunchConfig | None = None
    note: str = ""
    arch_note: str = ""

    @property
    def copies_keys(self) -> bool:
        """Whether it copies a sequence's keys and values, which takes memory; PyTorch's rows do."""
        return self.launch is None or self.copied_bytes > 0

    @property
    def has_run(self) -> bool:
        """Whether a GPU has ever run it."""
        return self.measured is None or bool(self.measured)

    def unsuited(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch
    ) -> tuple[str, ...]:
        """List why another row computes a step of a problem that this row supports; empty if this one does.

        A recorded step is for any lengths up to a limit. For many sequences and a long limit, a row that copies keys
        would consist of launches for parts without keys when the recording is replayed.
        """
        reasons = []
        if batch.max_seqlen_k < self.fewest_keys:
            reasons.append(f"{batch.max_seqlen_k} keys are fewer than {self.fewest_keys}")
        if self.copied_bytes:
            count = sequences_of_part(problem, batch.max_seqlen_k, self.copied_bytes)
            if (parts := -(-batch.num_seqs // count)) > _MOST_PARTS:
                reasons.append(f"{parts} parts of keys, at most {_MOST_PARTS}")
        return tuple(reasons)

    def unsupported(self, problem: AttentionProblem, arch: GPUArch) -> tuple[str, ...]:
        """List every reason why this row cannot solve `problem` on `arch`; empty if it can."""
        tests = (
            (problem.phase is not self.phase, f"solves {self.phase.value} only"),
            *((True, reason) for reason in self._unsupported_arch(arch)),
            (problem.dtype not in self.dtypes, f"no {problem.dtype}"),
            (
                self.head_dims is not None and problem.head_dim not in self.head_dims,
                f"head_dim {problem.head_dim} is not one of {sorted(self.head_dims or ())}",
            ),
            (
                not self._takes_block_size(problem.block_size),
                f"block_size {problem.block_size} is not from {self._block_range()}",
            ),
            (
                self.power_of_two_blocks and (problem.block_size or 1).bit_count() > 1,
                f"block_size {problem.block_size} is not a power of two",
            ),
            (problem.block_size is not None and not self.paged, "no paged cache"),
            (problem.block_size is None and not self.packed, "no packed keys and values"),
            (
                self.group_sizes is not None and problem.group_size not in self.group_sizes,
                f"no groups of {problem.group_size} query heads per key-value head",
            ),
            (problem.sliding_window is not None and not self.sliding_window, "no sliding window"),
            (problem.softcap is not None and not self.softcap, "no softcap"),
            (not problem.causal and not self.non_causal, "causal only"),
            (
                problem.phase is Phase.DECODE
                and problem.max_query_tokens > 1
                and not self.several_queries,
                f"decodes 1 query token per sequence, not {problem.max_query_tokens}",
            ),
            (problem.lse and not self.lse, "no log-sum-exp"),
            (problem.batch_invariant and not self.batch_invariant, "not batch invariant"),
            (self.quantized_only and problem.kv_dtype is None, "reads quantized caches only"),
            (not problem.unmeasured and not self._is_measured(problem), self._unmeasured(problem)),
        )
        reasons = tuple(reason for applies, reason in tests if applies)
        if problem.kv_dtype is None:
            return reasons
        if self.quantized is None:
            return (*reasons, f"no {problem.kv_dtype} cache")
        return (*reasons, *self.quantized.unsupported(problem, arch))

    def _is_measured(self, problem: AttentionProblem) -> bool:
        return self.measured is None or (problem.head_dim, problem.group_size) in self.measured

    def _unmeasured(self, problem: AttentionProblem) -> str:
        if not self.has_run:
            return NEVER_RUN
        shape = (
            f"head_dim {problem.head_dim} and {problem.group_size} query heads per key-value head"
        )
        return f"not measured for {shape}, and {NOT_ALLOWED}"

    def _unsupported_arch(self, arch: GPUArch) -> tuple[str, ...]:
        if arch.is_cpu:
            if self.in_library and isinstance(reason := load(), str):
                return (reason,)
            return () if self.cpu else ("needs a GPU",)
        if self.sm is None:
            return ()
        return arch.unsupported(self.sm, self.arch_note) if self.sm else ("runs on the CPU only",)

    def _takes_block_size(self, size: int | None) -> bool:
        if size is None or self.block_sizes is None:
            return True
        return self.block_sizes[0] <= size <= self.block_sizes[1]

    def _block_range(self) -> str:
        return f"{self.block_sizes[0]} to {self.block_sizes[1]}" if self.block_sizes else "any"
