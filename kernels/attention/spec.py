"""A row of the registry: what a kernel accepts, with its reasons for what it does not.

Knows no kernel, nor which row comes before which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.attention.problem import Phase

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from kernels.attention.problem import AttentionProblem, LaunchConfig
    from kernels.attention.quantized_cache import QuantisedCache


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
        block_sizes: smallest and largest block size, both included; None for any.
        power_of_two_blocks: whether a block size must be a power of two.
        group_sizes: accepted numbers of query heads per key-value head; None for any.
        paged: whether it reads a cache in blocks.
        packed: whether it reads packed keys and values.
        sliding_window: whether it can limit attention to a window.
        softcap: whether it can cap scores.
        non_causal: whether a query may see keys after its own token.
        several_queries: whether a decode may have more than one query token per sequence.
        lse: whether it can write the log-sum-exp.
        batch_invariant: whether a sequence's result can be made independent of its batch.
        fp8: whether it multiplies in FP8, so that only problems that allow it are for it.
        persistent: whether at most one thread block per SM is launched, which takes tile after tile.
        row_tiles: values of `block_m` that it is written for; None for any power of two.
        quantised: which quantised caches it reads; None for none.
        launch: tile sizes that are safe wherever it runs; `kernels/tuning` has better ones. None
            where there is nothing to launch.
        note: what a reader of the plan should know about this row.
        arch_note: why it runs nowhere else, for the refusal.
    """

    name: str
    phase: Phase
    target: str
    dtypes: frozenset[str]
    cpu: bool = False
    sm: tuple[int, int] | None = None
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
    fp8: bool = False
    persistent: bool = False
    row_tiles: frozenset[int] | None = None
    quantised: QuantisedCache | None = None
    launch: LaunchConfig | None = None
    note: str = ""
    arch_note: str = ""

    def refuse(self, problem: AttentionProblem, arch: GPUArch) -> tuple[str, ...]:
        """List every reason why this row cannot solve `problem` on `arch`; empty if it can."""
        tests = (
            (problem.phase is not self.phase, f"solves {self.phase.value} only"),
            (not self._runs_on(arch), self._arch_reason(arch)),
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
            (self.fp8 and not problem.fp8, "the problem does not allow FP8"),
        )
        reasons = tuple(reason for refused, reason in tests if refused)
        if problem.kv_dtype is None:
            return reasons
        if self.quantised is None:
            return (*reasons, f"no {problem.kv_dtype} cache")
        return (*reasons, *self.quantised.refuse(problem, arch))

    def _takes_block_size(self, size: int | None) -> bool:
        if size is None or self.block_sizes is None:
            return True
        return self.block_sizes[0] <= size <= self.block_sizes[1]

    def _block_range(self) -> str:
        return f"{self.block_sizes[0]} to {self.block_sizes[1]}" if self.block_sizes else "any"

    def _runs_on(self, arch: GPUArch) -> bool:
        if arch.is_cpu:
            return self.cpu
        return self.sm is not None and self.sm[0] <= arch.sm <= self.sm[1]

    def _arch_reason(self, arch: GPUArch) -> str:
        if arch.is_cpu:
            return "needs a GPU"
        if self.sm is None:
            return "runs on the CPU only"
        lowest, highest = self.sm
        needed = f"sm_{lowest}" if lowest == highest else f"sm_{lowest} to sm_{highest}"
        text = f"needs {needed}, this is sm_{arch.sm}"
        return f"{text} ({self.arch_note})" if self.arch_note else text
