"""The minimum work of a step, and the minimum time that a processor needs for it: its roofline.

A step reads the weights once and the keys and values of each sequence once, and does the arithmetic that the model's
formulas require. The numbers do not depend on the kernels in use.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kernels import Phase
from kernels.weight_format import FP8_ROWS, unquantized
from model.network.attention_problems import attention_problem, same_problem
from model.network.parallel import head_rows
from model.network.sizes import dtype_bytes, table_bytes
from model.network.spec import Attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels import AttentionProblem, GPUArch
    from kernels.weight_format import WeightFormat
    from model.network.spec import Network


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step.

    Attributes:
        bytes_moved: of everything that is read or written, once each.
        flops: operations of the matrix products; a multiply-add counts as two.
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
    """Count the work of attention of sequences of one length: queries, output, and keys and values that a query sees.

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


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences of one step with the same lengths.

    Attributes:
        count: number of sequences.
        new_tokens: tokens of each sequence that the step computes.
        context: total tokens of each sequence, including the new ones.
    """

    count: int
    new_tokens: int
    context: int


class SizedModel(Protocol):
    """What is read of a `DecoderLM`, or of `ModelSizes`; with several ranks, of one."""

    weight_format: WeightFormat
    network: Network

    @property
    def dtype_name(self) -> str:
        """Name of the dtype of parameters and activations."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the model."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters."""


class ModelWork:
    """Counts the work of a model's steps.

    Args:
        model: whose work it is.
        block_size: tokens in a block of the KV cache.
        arch: the processor.
        kv_dtype: dtype of a quantized KV cache; None if the cache has the model's dtype.

    Attributes:
        num_layers: of the model.
    """

    def __init__(
        self, model: SizedModel, block_size: int, arch: GPUArch, kv_dtype: str | None = None
    ) -> None:
        network, dtype = model.network, model.dtype_name
        self._arch = arch
        # Numbers of other formats are dequantized before they are multiplied.
        form = FP8_ROWS if model.weight_format == FP8_ROWS else unquantized(dtype)
        self._dtype = form.dtype
        self._head = head_rows(network.vocab, model.num_ranks) * network.hidden
        sizes = [layer.num_parameters(network.hidden) for layer in network.layers]
        first = network.num_writing
        self._inner = sum(sizes[:first]) + network.norm.num_parameters(network.hidden)
        self._inner_of_wanted = sum(sizes[first:])
        # A step reads only the rows of its tokens of the tables, but all of the head, which may be one of them.
        unread = table_bytes(network, dtype, model.num_ranks)
        self._read_bytes = model.weight_bytes - unread + self._head * dtype_bytes(dtype)
        self.num_layers = len(network.layers)
        self._state_bytes = network.state(kv_dtype or dtype).slot_bytes
        counts = Counter(
            (same_problem(layer.mixer), index >= first)
            for index, layer in enumerate(network.layers)
            if isinstance(layer.mixer, Attention)
        )
        # Of a prompt, layers that compute no keys compute one token.
        self._attention: list[tuple[dict[Phase, AttentionProblem], bool, int]] = [
            (
                {it: attention_problem(mixer, it, dtype, block_size, kv_dtype) for it in Phase},
                only_wanted,
                count,
            )
            for (mixer, only_wanted), count in counts.items()
        ]

    def step(self, rows: Sequence[Rows]) -> Work:
        """Count the work of a step in which every sequence gets a token."""
        tokens = sum(row.count * row.new_tokens for row in rows)
        sequences = sum(row.count for row in rows)
        moved = self._read_bytes
        flops = 2 * self._inner * tokens + 2 * (self._inner_of_wanted + self._head) * sequences
        for row in rows:
            moved += 2 * row.count * self._state_bytes  # read and written
            for problems, only_wanted, layers in self._attention:
                new_tokens = 1 if only_wanted else row.new_tokens
                phase = Phase.DECODE if new_tokens == 1 else Phase.PREFILL
                attention = attention_work(problems[phase], row.count, new_tokens, row.context)
                moved += layers * attention.bytes_moved
                flops += layers * attention.flops
        return Work(moved, flops)

    def limit(self, work: Work) -> Roofline | None:
        """Return the minimum time for the work; None if the processor's peaks are not known."""
        return roofline(work, self._dtype, self._arch)

    def shares(self, work: Work, seconds: float) -> tuple[float | None, float | None]:
        """Return the shares of peak bandwidth and peak arithmetic that the work reaches; None for an unknown peak."""
        bandwidth = 1e9 * self._arch.memory_bandwidth_gbs
        peak = 1e12 * self._arch.peak_tflops(self._dtype)
        return (
            work.bytes_moved / seconds / bandwidth if bandwidth else None,
            work.flops / seconds / peak if peak else None,
        )

    def decode_seconds(self, sequences: int, context: int, steps: int) -> float | None:
        """Return the minimum time of successive decode steps; None if the processor's peaks are not known.

        Args:
            sequences: number of sequences.
            context: tokens of each sequence in the first step, including the new one.
            steps: number of steps.
        """
        limits = [
            self.limit(self.step([Rows(sequences, 1, context + step)])) for step in range(steps)
        ]
        if None in limits:
            return None
        return sum(limit.seconds for limit in limits if limit is not None)

    def requests_seconds(self, prompts: Sequence[int], outputs: Sequence[int]) -> float | None:
        """Return the minimum time for requests that arrive together, in one step per token of the longest output."""
        steps = max(outputs)
        moved = self._read_bytes * steps
        flops = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            # The keys and values read grow linearly, so the middle step has the average.
            work = [(1, self.step([Rows(1, prompt, prompt)]))]
            if output > 1:
                work.append((output - 1, self.step([Rows(1, 1, prompt + output // 2)])))
            for times, one in work:
                moved += times * (one.bytes_moved - self._read_bytes)
                flops += times * one.flops
        limit = self.limit(Work(moved, flops))
        return None if limit is None else limit.seconds
