"""The minimum work of a step, and the minimum time that a processor needs for it.

A step reads the weights once and the keys and values of each sequence once, and does the arithmetic that the model's
formulas require. The numbers do not depend on the kernels in use.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels import Phase
from kernels.roofline import Roofline, Work, attention_work, roofline
from kernels.weight_format import WeightFormat, unquantized
from model.network.attention_plans import AttentionPlanner, attention_problems, same_problem
from model.network.layers import DecoderLayer, norm_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels import AttentionProblem, GPUArch
    from model.network.spec import Network


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


class ModelWork:
    """Counts the work of a model's steps.

    Args:
        network: what the processor computes of the model.
        dtype: dtype of weights and activations.
        block_size: tokens in a block of the KV cache.
        arch: the processor.
        kv_dtype: dtype of a quantized KV cache; None if the cache has `dtype`.
        weight_format: of the layers' matrices; None for full numbers of `dtype`.

    Attributes:
        num_layers: of the model.
    """

    def __init__(
        self,
        network: Network,
        dtype: torch.dtype,
        block_size: int,
        arch: GPUArch,
        kv_dtype: str | None = None,
        weight_format: WeightFormat | None = None,
    ) -> None:
        self._arch = arch
        form = weight_format or unquantized(dtype)
        self._dtype = (form if form.float else unquantized(dtype)).dtype
        self._head = network.vocab * network.hidden
        # A step reads the rows of its tokens only of the embedding, unless that is also the LM head, and of learned
        # positions.
        self._read, self._read_bytes = self._head, self._head * dtype.itemsize
        for layer, count in Counter(network.layers).items():
            parameters = DecoderLayer(
                layer, network.hidden, dtype, torch.device("meta"), weight_format
            )
            held = (*parameters.parameters(), *parameters.buffers())
            self._read += count * layer.num_parameters(network.hidden)
            self._read_bytes += count * sum(tensor.nbytes for tensor in held)
        norms = [norm_dtype(network.norm, dtype)]
        if network.norm.kind == "layer":
            norms.append(dtype)
        self._read += network.hidden * len(norms)
        self._read_bytes += network.hidden * sum(it.itemsize for it in norms)
        self.num_layers = len(network.layers)
        planner = AttentionPlanner(attention_problems(network), str(dtype).removeprefix("torch."))
        self._problems = {
            (mixer, phase): planner.problem(mixer, phase, block_size, kv_dtype)
            for mixer in planner.mixers
            for phase in Phase
        }
        self._layers = Counter(same_problem(layer.mixer) for layer in network.layers)

    def step(self, rows: Sequence[Rows]) -> Work:
        """Count the work of a step in which every sequence gets a token."""
        tokens = sum(row.count * row.new_tokens for row in rows)
        sequences = sum(row.count for row in rows)
        moved = self._read_bytes
        flops = 2 * (self._read - self._head) * tokens + 2 * self._head * sequences
        for row in rows:
            phase = Phase.DECODE if row.new_tokens == 1 else Phase.PREFILL
            for mixer, layers in self._layers.items():
                attention = self._attention(self._problems[mixer, phase], row)
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

    @staticmethod
    def _attention(problem: AttentionProblem, row: Rows) -> Work:
        return attention_work(problem, row.count, row.new_tokens, row.context)
