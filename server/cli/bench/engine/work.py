"""The least work that a step of a model is, and the least time a processor needs for it.

Weights are read once a step, the keys and values of each sequence once, and multiplied as often as the mathematics
asks for. Knows no kernels, and nothing of the time that was really taken.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels import Phase
from kernels.roofline import Roofline, Work, attention_work, roofline
from model.network.decoder import DecoderLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels import AttentionProblem, GPUArch
    from model.checkpoint.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences of one step that are alike.

    Attributes:
        count: of sequences.
        new_tokens: of each, computed in the step.
        context: tokens of each, the new ones included.
    """

    count: int
    new_tokens: int
    context: int


class ModelWork:
    """Counts the work of a model's steps.

    Args:
        config: of the model.
        dtype: of weights and activations.
        block_size: tokens of a block of the KV cache.
        arch: processor.
        kv_dtype: of a quantised KV cache; None for one of `dtype`.
        weight_dtype: of the layers' matrices where they are quantised.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        block_size: int,
        arch: GPUArch,
        kv_dtype: str | None = None,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        self._arch = arch
        self._dtype = str(weight_dtype or dtype).removeprefix("torch.")
        head = config.vocab_size * config.hidden_size
        # Of an embedding only the tokens' rows are read; tied to the head, it is read as the head.
        self._read = config.num_parameters - (0 if config.tie_word_embeddings else head)
        self._head = head
        self._layers = Counter(config.layer_window(layer) for layer in range(config.num_layers))
        model = DecoderLM(config, dtype, "meta", weight_dtype)
        self._read_bytes = sum(parameter.nbytes for parameter in model.parameters())
        if not config.tie_word_embeddings:
            self._read_bytes -= model.embed_tokens.nbytes
        problems = model.attention_problems(block_size, kv_dtype)
        self._problems = {(p.phase, p.sliding_window): p for p in problems}

    def step(self, rows: Sequence[Rows]) -> Work:
        """Count the work of a step in which every sequence gets a token."""
        tokens = sum(row.count * row.new_tokens for row in rows)
        sequences = sum(row.count for row in rows)
        moved = self._read_bytes
        flops = 2 * (self._read - self._head) * tokens + 2 * self._head * sequences
        for row in rows:
            phase = Phase.DECODE if row.new_tokens == 1 else Phase.PREFILL
            for window, layers in self._layers.items():
                attention = self._attention(self._problems[phase, window], row)
                moved += layers * attention.bytes_moved
                flops += layers * attention.flops
        return Work(moved, flops)

    def limit(self, work: Work) -> Roofline | None:
        """The least time for it; None where the processor's peaks are not known."""
        return roofline(work, self._dtype, self._arch)

    def shares(self, work: Work, seconds: float) -> tuple[float | None, float | None]:
        """Of the peak bandwidth and of the peak arithmetic, for work done in this time; None where not known."""
        bandwidth = 1e9 * self._arch.memory_bandwidth_gbs
        peak = 1e12 * self._arch.peak_tflops(self._dtype)
        return (
            work.bytes_moved / seconds / bandwidth if bandwidth else None,
            work.flops / seconds / peak if peak else None,
        )

    def decode_seconds(self, sequences: int, context: int, steps: int) -> float | None:
        """The least time for steps of sequences of one length, each a token longer than before.

        Args:
            sequences: that decode.
            context: tokens of each in the first of the steps, the new one included.
            steps: to sum up.
        """
        limits = [
            self.limit(self.step([Rows(sequences, 1, context + step)])) for step in range(steps)
        ]
        if None in limits:
            return None
        return sum(limit.seconds for limit in limits if limit is not None)

    def requests_seconds(self, prompts: Sequence[int], outputs: Sequence[int]) -> float | None:
        """The least time for requests that are there at once, with as few steps as the longest output has."""
        steps = max(outputs)
        moved = self._read_bytes * steps
        flops = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            # Keys and values read grow linearly, so the step in the middle stands for all.
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
