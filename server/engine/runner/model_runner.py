"""Computes a step: batch, forward pass, sampling. The only part of the engine's loop that waits for the device.

`launch` gives a step to the device and waits for nothing; what it returns waits for the results. The tokens that a
step draws stay on the device too, where the next one finds those that the host has not seen (`drawn_tokens`).
"""

from __future__ import annotations

import functools
import logging
import traceback
from typing import TYPE_CHECKING

import msgspec
import torch

from kernels import Phase, detect, select, shared_prefix_pays, takes_shared_prefix
from kernels.gpu.compile_ahead import NotCompiledError, compile_ahead, compile_nothing
from model.device.memory import is_out_of_memory, release_cached
from model.network.single_launch import OneSequence, why_not
from model.sampling.logprobs import prompt_logprobs
from model.sampling.rows import SamplingRow, TokenHistory
from model.sampling.sampler import Sampler
from server.engine.link.plan_report import PlanReport
from server.engine.runner.dummy_steps import (
    crowds,
    draws,
    few_rows,
    first_steps,
    largest_step,
    sharing,
    undrawn_token,
)
from server.engine.runner.model_plan import explain_model
from server.engine.runner.sampled_tokens import DrawnTokens
from server.engine.runner.startup_progress import clocked
from server.engine.runner.step_graph import StepModel, choose_invented
from server.engine.runner.step_graphs import StepGraphs, wants_hidden
from server.engine.runner.step_input import build_batch
from server.engine.runner.step_result import (
    Drawn,
    PendingStep,
    PromptLogprobs,
    StepResult,
    most_likely,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels import AttentionProblem
    from model.device.kv_cache import KVCache
    from model.device.replay import Recorder
    from model.network.decoder import DecoderLM
    from model.network.metadata import AttentionMetadata
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.sequence import Sequence
    from server.engine.core.step import ScheduledSequence, SchedulerOutput
    from server.engine.runner.shared_prefix import SharingPays
    from server.engine.runner.step_input import ModelInput

log = logging.getLogger("tessera.engine")

# Rows of logits held at once for a prompt's log-probabilities: bounds the memory at large vocabularies.
_PROMPT_LOGPROB_ROWS = 256
_CPU_WARM_UP_TOKENS = 65
_FEWEST_DRAWN = 64
_ROWS_OF_A_CHOICE = (1, 2, 4, 8)  # up to four the head's programs choose


def decodes_one(output: SchedulerOutput) -> bool:
    """Whether a step is one token of one sequence, and all that is wanted is the next one.

    A prompt may be computed a token at a time too, and its log-probabilities need hidden states.
    """
    if output.prefill or len(output.decode) != 1:
        return False
    (only,) = output.decode
    return only.samples and not wants_hidden(only)


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
        self._sharing_pays = self._find_sharing()
        self._graphs: StepGraphs | None = None
        self._drawn = DrawnTokens(_FEWEST_DRAWN, self._device)
        self._one_sequence: OneSequence | None = None
        if not why_not(model, detect(self._device)):
            self._one_sequence = OneSequence(model, kv_cache)
        self._sampler = Sampler()
        self._histories: dict[int, TokenHistory] = {}

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self._kv_cache.num_blocks * self._kv_cache.block_size

    @property
    def cache_dtype(self) -> str:
        """Of the KV cache's numbers, as PyTorch names it."""
        return str(self._kv_cache.dtype).removeprefix("torch.")

    def record_steps(self, limits: SchedulerConfig, recorder: Recorder) -> None:
        """Replay steps from now on, as soon as they are recorded.

        Args:
            limits: of a step.
            recorder: of the cache's device.
        """
        self._drawn = DrawnTokens(limits.max_num_seqs + 1, self._device)
        model = StepModel(self._model, self._kv_cache, recorder, self._drawn, self._one_sequence)
        self._graphs = StepGraphs(model, limits, self._sharing_pays)

    def use_idle_time(self) -> bool:
        """Record one kind of step; return whether there was one to record."""
        return self._graphs is not None and self._graphs.record_next()

    def forget(self, request_id: int) -> None:
        """Drop what is kept for a sequence that ended; an unknown id is ignored."""
        self._histories.pop(request_id, None)

    def recover(self, error: Exception) -> bool:
        """Bring the device back to work after a step that raised.

        Returns:
            Whether later steps can succeed: an illegal access leaves a CUDA context unusable.
        """
        out_of_memory = is_out_of_memory(error)
        if out_of_memory:
            traceback.clear_frames(error.__traceback__)  # they hold what the step had computed
        try:
            if out_of_memory:
                release_cached(self._device)
            if self._device.type == "cuda":
                # Not every error is fatal, nor has each a type that tells; every call on a broken context fails.
                torch.cuda.synchronize(self._device)
        except RuntimeError:
            return False
        return True

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute the scheduled tokens, draw one for each sequence that samples, and wait for them.

        Args:
            output: as for `launch`.
        """
        return self.launch(output).result()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Have the scheduled tokens computed and one drawn for each sequence that samples.

        Args:
            output: at least one scheduled sequence; its blocks are reserved. Of the tokens that it continues from,
                those that the host does not know are the ones that the step launched before it draws.
        """
        if self._graphs is not None and (computed := self._graphs.compute(output)) is not None:
            sampling = [s for s in (*output.decode, *output.prefill) if s.samples]
            self._drawn.note(sampling)
            if not sampling:
                return Drawn(None, {}, feeds_next=True)
            if all(s.sequence.is_argmax for s in sampling):
                return most_likely(computed, [s.sequence.sampling.logprobs for s in sampling])
            rows = [self._sampling_row(s.sequence) for s in sampling]
            logits = [part.logits for part in computed]
            return self._draw(logits[0] if len(logits) == 1 else torch.cat(logits), rows, {})
        return self._launch(output, self._sharing_pays)

    def _launch(self, output: SchedulerOutput, sharing_pays: SharingPays | None) -> PendingStep:
        scheduled = (*output.decode, *output.prefill)
        batch, metadata = self._prepare(output, sharing_pays)
        if self._one_sequence is not None and decodes_one(output):
            self._drawn.note(output.decode)
            logits = self._compute_one(self._one_sequence, batch)
            return self._draw(logits, [self._sampling_row(output.decode[0].sequence)], {})
        hidden = self._model(
            batch.input_ids, batch.positions, self._kv_cache, metadata, batch.drawn
        )
        prompt_logprobs = self._prompt_logprobs(scheduled, hidden)
        sampling = [s for s in scheduled if s.samples]
        self._drawn.note(sampling)
        if not sampling:
            return Drawn(None, prompt_logprobs, feeds_next=True)
        last = hidden if len(sampling) == len(hidden) else hidden[batch.last_rows]
        rows = [self._sampling_row(s.sequence) for s in sampling]
        return self._draw(self._model.logits(last), rows, prompt_logprobs)

    def _compute_one(self, one_sequence: OneSequence, batch: ModelInput) -> torch.Tensor:
        """Compute the decode step of one sequence; returns its logits, [1, V]."""
        assert batch.decode is not None
        head = self._model.embed_tokens
        logits = torch.empty((1, len(head)), dtype=head.dtype, device=self._device)
        one_sequence(
            batch.input_ids,
            batch.positions,
            batch.slot_mapping,
            batch.decode.block_table,
            logits,
            torch.empty(1, dtype=torch.int64, device=self._device),
            torch.empty(1, device=self._device),
            self._drawn.ids,
        )
        return logits

    def _draw(
        self,
        logits: torch.Tensor,
        rows: list[SamplingRow],
        prompt_logprobs: dict[int, PromptLogprobs],
    ) -> PendingStep:
        draw = self._sampler.begin(logits, rows)
        if len(rows) > len(self._drawn.ids):
            self._drawn.grow(len(rows))
        self._drawn.put(draw.tokens)
        return Drawn(draw, prompt_logprobs, draw.feeds_next)

    def warm_up(self, limits: SchedulerConfig, say: Callable[[str], None]) -> None:
        """Compute invented steps, so that no request pays for what is made at the first use.

        The keys and values go to block 0 and are overwritten by the first sequence there.

        Args:
            limits: of a step.
            say: told how far it is.
        """
        if self._device.type != "cuda":
            self._compute_first_steps(limits, say)
            return
        try:
            with compile_nothing(), clocked("computing first steps"):
                self._compute_first_steps(limits, say)
        except NotCompiledError:
            # Few of the steps were computed: a cold cache lacks the first kernel already.
            say("compiling kernels")
            with clocked("compiling kernels"):
                self._compile(limits)
            with clocked("computing first steps"):
                self._compute_first_steps(limits, say)
        with clocked("computing the largest step"):
            self.compute_largest_step(limits)

    def _compile(self, limits: SchedulerConfig) -> None:
        """Compile every kernel, many at once, and launch none."""
        try:
            with compile_ahead():
                self._compute_first_steps(limits, lambda _: None)
        except Exception:
            # What does not compile is told when it is launched.
            log.warning("not all kernels were compiled ahead", exc_info=True)

    def _compute_first_steps(self, limits: SchedulerConfig, say: Callable[[str], None]) -> None:
        """Compute the least that uses every kernel."""
        block_size = self._kv_cache.block_size
        lengths = self._distinct_lengths(limits.max_model_len)
        for number, length in enumerate(lengths, start=1):
            say(f"warming up, {number} of {len(lengths)}")
            for output in first_steps(length, limits, block_size):
                self._compute_invented(output)
            if self._one_sequence is not None:
                self._compute_invented(undrawn_token(length, block_size))
            if self._device.type == "cuda":
                for output in crowds(length, limits, block_size):
                    self._plan(output)
            if self._sharing_pays is not None:
                for output in sharing(length, limits, block_size):
                    self._compute_invented(output, lambda *_: True)
        if self._device.type == "cuda":
            few = few_rows(self._model.row_counts, limits, block_size)
            for output in (*few, *draws(block_size)):
                self._compute_invented(output)
            for num_rows in _ROWS_OF_A_CHOICE:
                choose_invented(self._model, min(num_rows, limits.max_num_seqs))

    def compute_largest_step(self, limits: SchedulerConfig) -> None:
        """Compute the step that needs the most memory; PyTorch keeps that memory for all later ones."""
        block_size, arch = self._kv_cache.block_size, detect(self._device)
        problems = self._attention_problems()
        length = min(limits.max_model_len, limits.max_num_batched_tokens)
        if any(select(problem, arch).spec.launch is None for problem in problems):
            length = limits.max_model_len  # PyTorch's rows copy keys and values, ours do not
        self._compute_invented(
            largest_step(max(2, length), limits, self._model.config.vocab_size, block_size)
        )

    def describe_plan(self) -> PlanReport:
        """Tell which attention kernels run, how they are launched, and why."""
        cache = self._kv_cache
        plan = explain_model(self._model, cache.block_size, detect(self._device), cache.kv_dtype)
        return msgspec.convert(plan, PlanReport, from_attributes=True)

    def _attention_problems(self) -> list[AttentionProblem]:
        return self._model.attention_problems(self._kv_cache.block_size, self._kv_cache.kv_dtype)

    def _find_sharing(self) -> SharingPays | None:
        """Tell when a step should read once what its sequences share; None where no layer can."""
        arch = detect(self._device)
        takers = [
            problem
            for problem in self._attention_problems()
            if problem.phase is Phase.DECODE and takes_shared_prefix(problem, arch)
        ]
        if not takers:
            return None
        # Full layers alone take it, and a model's are all alike.
        return functools.partial(shared_prefix_pays, takers[0], arch)

    def _prepare(
        self, output: SchedulerOutput, sharing_pays: SharingPays | None
    ) -> tuple[ModelInput, AttentionMetadata]:
        """Lay out a step and plan its attention; on a GPU both are queued, not waited for."""
        cache = self._kv_cache
        batch = build_batch(output, cache.block_size, self._device, self._drawn, sharing_pays)
        metadata = self._model.attention_metadata(
            batch.slot_mapping, cache.block_size, batch.decode, batch.prefill, cache.kv_dtype
        )
        return batch, metadata

    @torch.inference_mode()
    def _plan(self, output: SchedulerOutput) -> None:
        self._prepare(output, None)

    @torch.inference_mode()
    def _compute_invented(
        self, output: SchedulerOutput, sharing_pays: SharingPays | None = None
    ) -> None:
        try:
            self._launch(output, sharing_pays or self._sharing_pays).result()
        finally:
            for scheduled in (*output.decode, *output.prefill):
                self.forget(scheduled.sequence.request_id)

    def _distinct_lengths(self, longest: int) -> list[int]:
        """Lengths of sequences, one for each choice of tile sizes that the kernels have, at most `longest`."""
        arch = detect(self._device)
        if arch.is_cpu:
            return [min(longest, _CPU_WARM_UP_TOKENS)]
        lengths = {longest}
        for problem in self._attention_problems():
            bounds = (row.max_seqlen_k for row in select(problem, arch).launches)
            lengths.update(min(longest, max(2, bound)) for bound in bounds if bound is not None)
        return sorted(lengths)

    def _sampling_row(self, sequence: Sequence) -> SamplingRow:
        """Return the sampler's row for the next token of a sequence; its history is kept between steps."""
        history = self._histories.get(sequence.request_id)
        if history is None:
            history = TokenHistory(sequence.token_ids, sequence.num_prompt_tokens)
            self._histories[sequence.request_id] = history
        return SamplingRow(sequence.sampling, sequence.num_known_tokens, history)

    def _prompt_logprobs(
        self, scheduled: tuple[ScheduledSequence, ...], hidden: torch.Tensor
    ) -> dict[int, PromptLogprobs]:
        results: dict[int, PromptLogprobs] = {}
        first_row = 0
        for s in scheduled:
            sequence, row = s.sequence, first_row
            first_row += s.num_tokens
            if not sequence.sampling.prompt_logprobs or sequence.num_known_output_tokens:
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
