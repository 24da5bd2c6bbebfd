"""The roofline of an attention step: the minimal work, and the minimal time that a processor needs for it.

The work is every visible key and value read once from main memory, and two matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from kernels.attention.problem import AttentionProblem


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step.

    Attributes:
        bytes_moved: of queries, output, and the keys and values that at least one query sees, once each.
        flops: operations of the two matrix products over the visible keys; a multiply-add counts as two.
    """

    bytes_moved: int
    flops: int

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes_moved


@dataclass(frozen=True, slots=True)
class Roofline:
    """The minimal time that a processor needs for some work.

    Attributes:
        seconds: the larger of the times that memory and arithmetic need at their peaks.
        bound: "memory" or "compute", whichever needs longer.
    """

    seconds: float
    bound: str


def attention_work(
    problem: AttentionProblem, num_seqs: int, query_tokens: int, context: int
) -> Work:
    """Count the work of sequences of one length.

    Args:
        problem: heads, dtype, window, causality.
        num_seqs: B.
        query_tokens: of each sequence; they are its last tokens.
        context: tokens of each sequence, the query tokens included.
    """
    seen = [_visible(problem, context - query_tokens + i, context) for i in range(query_tokens)]
    visible = sum(stop - first for first, stop in seen)
    read = seen[-1][1] - seen[0][0]
    element = 4 if problem.dtype == "float32" else 2
    rows = problem.num_heads * query_tokens
    moved = 2 * (
        rows * problem.head_dim * element + problem.num_kv_heads * read * problem.row_bytes
    )
    flops = 4 * problem.num_heads * problem.head_dim * visible
    return Work(num_seqs * moved, num_seqs * flops)


def roofline(work: Work, dtype: str, arch: GPUArch) -> Roofline | None:
    """Return the minimal time for `work`; None if a peak of the processor is not known.

    Source: Williams et al., "Roofline: an insightful visual performance model", 2009.
    """
    peak = arch.peak_tflops(dtype)
    if not (peak and arch.memory_bandwidth_gbs):
        return None
    moving = work.bytes_moved / (arch.memory_bandwidth_gbs * 1e9)
    computing = work.flops / (peak * 1e12)
    return Roofline(max(moving, computing), "memory" if moving >= computing else "compute")


def _visible(problem: AttentionProblem, position: int, context: int) -> tuple[int, int]:
    """Return the first key that the token at `position` sees, and one past its last."""
    window = problem.sliding_window
    first = 0 if window is None else max(0, position - window + 1)
    return first, position + 1 if problem.causal else context
