"""Computes a step: batch, forward pass, sampling. The only part of the engine that touches tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels import Phase, detect, select
from model.sampler import Sampler, prompt_logprobs
from model.sampling import SamplingRow, TokenHistory
from server.engine.batch import build_batch
from server.engine.request import GenerateRequest, SamplingParams
from server.engine.scheduler import ScheduledSequence, SchedulerOutput
from server.engine.sequence import Sequence

if TYPE_CHECKING:
    from model.decoder import DecoderLM
    from model.kv_cache import KVCache
    from model.sampling import SampledToken

# Rows of logits held at once for a prompt's log-probabilities: bounds the memory at large vocabularies.
_PROMPT_LOGPROB_ROWS = 256


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens `start + 1 ...`, computed by one chunk."""

    start: int
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed.

    Attributes:
        sampled: one for each scheduled sequence that samples, in the scheduler's order.
        prompt_logprobs: by request id, for sequences that ask for them.
    """

    sampled: list[SampledToken]
    prompt_logprobs: dict[int, PromptLogprobs]


class ModelRunner:
    """Owns the model and the KV cache. Used by the engine's thread alone.

    Args:
        model: in evaluation mode, on the cache's device.
        kv_cache: its blocks are handed out by the engine's `BlockManager`.
    """

    def __init__(self, model: DecoderLM, kv_cache: KVCache) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._device = kv_cache.layer(0).device
        self._sampler = Sampler()
        self._rows: dict[int, SamplingRow] = {}

    def forget(self, request_id: int) -> None:
        """Drop what is kept for a sequence that ended; an unknown id is ignored."""
        self._rows.pop(request_id, None)

    def is_fatal(self, error: Exception) -> bool:
        """Whether no later step can succeed: an illegal access leaves a CUDA context unusable."""
        return isinstance(error, torch.AcceleratorError)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute the scheduled tokens and draw one for each sequence that samples.

        Args:
            output: at least one scheduled sequence; its blocks are reserved.
        """
        scheduled = (*output.decode, *output.prefill)
        batch = build_batch(output, self._kv_cache.block_size, self._device)
        metadata = self._model.attention_metadata(
            batch.slot_mapping, self._kv_cache.block_size, batch.decode, batch.prefill
        )
        hidden = self._model(batch.input_ids, batch.positions, self._kv_cache, metadata)
        rows = [self._sampling_row(s.sequence) for s in scheduled if s.samples]
        sampled: list[SampledToken] = []
        if rows:
            last = hidden if len(rows) == len(hidden) else hidden[batch.last_rows]
            sampled = self._sampler.forward(self._model.logits(last), rows)
        return StepResult(sampled, self._prompt_logprobs(scheduled, hidden))

    def warm_up(self, max_num_batched_tokens: int, max_total_tokens: int) -> None:
        """Run a prompt and one more token, so that no request pays for the libraries' first use.

        The keys and values go to block 0 onwards and are overwritten by the first sequence there.

        Args:
            max_num_batched_tokens: of a step.
            max_total_tokens: of a sequence, at least 2.
        """
        length = max(1, min(max_num_batched_tokens, max_total_tokens - 1, 64))
        sequence = Sequence(
            GenerateRequest(
                request_id=0,
                prompt_token_ids=[0] * (length + 1),
                sampling=SamplingParams(max_new_tokens=1),
            )
        )
        sequence.block_table = list(range(-(-(length + 1) // self._kv_cache.block_size)))
        chunk = (ScheduledSequence(sequence, 0, length, samples=True),)
        token = (ScheduledSequence(sequence, length, 1, samples=True),)
        for decode, prefill in (((), chunk), (token, ())):
            self.execute(
                SchedulerOutput(
                    step=0,
                    decode=decode,
                    prefill=prefill,
                    num_tokens=length if prefill else 1,
                    first_scheduled=(),
                    preempted=(),
                )
            )
        self.forget(sequence.request_id)

    def describe_plan(self) -> dict[str, str]:
        """Name the attention kernel of each phase, and why it was chosen."""
        arch = detect(self._device)
        return {
            phase.value: select(
                self._model.attention_problem(phase, self._kv_cache.block_size), arch
            ).why
            for phase in Phase
        }

    def _sampling_row(self, sequence: Sequence) -> SamplingRow:
        """What the sampler needs for a sequence's next token; kept and brought up to date."""
        sampling = sequence.sampling
        row = self._rows.get(sequence.request_id)
        if row is None:
            row = self._rows[sequence.request_id] = SamplingRow(
                seed=sampling.seed,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                typical_p=sampling.typical_p,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                prompt_ids=sequence.token_ids[: sequence.num_prompt_tokens],
                history=TokenHistory(),
                logprobs=sampling.logprobs,
                top_logprobs=sampling.top_logprobs,
            )
        row.position = sequence.num_tokens
        row.banned = tuple(sequence.banned_token_ids)
        if row.has_penalties:
            row.output_ids = sequence.output_token_ids
        return row

    def _prompt_logprobs(
        self, scheduled: tuple[ScheduledSequence, ...], hidden: torch.Tensor
    ) -> dict[int, PromptLogprobs]:
        results: dict[int, PromptLogprobs] = {}
        first_row = 0
        for s in scheduled:
            sequence, row = s.sequence, first_row
            first_row += s.num_tokens
            if not sequence.sampling.prompt_logprobs or sequence.num_output_tokens:
                continue
            # The row of token i says how likely token i + 1 was; the last prompt token's row is sampled.
            following = sequence.token_ids[s.start + 1 : s.start + 1 + s.num_tokens]
            logprobs: list[float] = []
            for i in range(0, len(following), _PROMPT_LOGPROB_ROWS):
                ids = following[i : i + _PROMPT_LOGPROB_ROWS]
                logits = self._model.logits(hidden[row + i : row + i + len(ids)])
                logprobs += prompt_logprobs(logits, torch.tensor(ids, device=logits.device))
            results[sequence.request_id] = PromptLogprobs(s.start, logprobs)
        return results
