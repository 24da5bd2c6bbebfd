"""Computes a step: packs its input, runs the model and samples.

`launch` returns without waiting for the device; the object it returns waits for the results. Sampled tokens also stay
on the device, where the next step reads those that the host does not know yet (`sampled_tokens`).
"""

from __future__ import annotations

import functools
import itertools
import traceback
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, cast

import msgspec
import torch

from kernels import Phase, detect, shared_prefix_is_faster, takes_shared_prefix
from model.device.memory import is_out_of_memory, release_cached
from model.executors.layers.recurrent import StateKernels, state_kernels
from model.executors.single_launch import exact_rows
from model.executors.step import StepOutput
from model.sampling.mask import RowMasks
from model.sampling.rows import SamplingRow, TokenHistory
from model.sampling.sampler import Sampler
from server.engine.core.sequence import SequenceStatus
from server.engine.core.step import PromptLogprobs
from server.engine.runner.explain.model_plan import explain_model
from server.engine.runner.step.batch_needs import DecodeNeeds, needs_of_prompts, scores_prompt
from server.engine.runner.step.buckets import padded_rows
from server.engine.runner.step.executor import StepExecutor
from server.engine.runner.step.recordings import RecordedSteps
from server.engine.runner.step.sampled_tokens import SampledTokens
from server.engine.runner.step.shared_prefix import shared_blocks
from server.engine.runner.step.step_input import (
    PackedStep,
    exact_bucket,
    is_exact,
    scored_bucket,
    scored_tokens,
)
from server.engine.runner.step.step_result import GreedyStep, SampledStep, WaitingStep, suffices

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as TypingSequence
    from concurrent.futures import Future

    from kernels import AttentionProblem
    from model.decoder import DecoderLM
    from model.device.kv_cache import KVCache
    from model.device.replay import Recorder
    from model.executors.columns import Bucket
    from model.executors.step import PromptScores
    from model.sampling.device import SampleTables
    from model.sampling.followed_matcher import FollowedMatcher
    from model.sampling.parameters import SampledToken, SamplingParams
    from model.sampling.sampler import PendingTokens
    from server.engine.core.grammar import Matcher
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.plan_report import PlanReport
    from server.engine.core.sequence import Sequence
    from server.engine.core.step import (
        DecodeRows,
        PendingStep,
        ScheduledSequence,
        SchedulerOutput,
        StepResult,
    )
    from server.engine.runner.step.grammars import Grammars
    from server.engine.runner.step.shared_prefix import SharingRule

_FEWEST_SAMPLED: Final = 64
_KEPT_INPUTS: Final = 8
"""Number of inputs kept for later steps of the same bucket that have no recording."""


class ModelRunner:
    """Owns the model and the KV cache. Only the engine's thread uses it.

    Args:
        model: in evaluation mode, on the cache's device.
        kv_cache: the engine's `BlockManager` allocates its blocks.
        grammars: compiles the grammars of sequences; None if none has one.
        deterministic: whether all sequences are deterministic.

    Attributes:
        exact_rows: of `SchedulerConfig`; 1 once the driver has refused a single launch.
        executor: computes the packed steps; may be replaced before `record_steps`.
        num_blocks: blocks of the cache that sequences may use.
    """

    def __init__(
        self,
        model: DecoderLM,
        kv_cache: KVCache,
        grammars: Grammars | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self.model, self.kv_cache, self.deterministic = model, kv_cache, deterministic
        self.executor = StepExecutor(model, kv_cache)
        self.num_blocks = kv_cache.num_blocks
        self._exact_rows = exact_rows(model.executors.problem(detect(kv_cache.device)))
        self._has_states = kv_cache.spec.slot_bytes > 0
        self._grammars = grammars
        self.device = kv_cache.device
        self.sharing_rule = self._find_sharing_rule()
        self.recorded: RecordedSteps | None = None
        self._sampled = SampledTokens(_FEWEST_SAMPLED, self.device)
        self._inputs: OrderedDict[Bucket, PackedStep] = OrderedDict()
        self._sampler = Sampler()
        self._needs = DecodeNeeds()
        self._histories: dict[int, TokenHistory] = {}
        self._planned: SampleTables | None = None  # of the launched step that waits

    @property
    def exact_rows(self) -> int:
        """See the attributes."""
        return 1 if self.model.executors.has_refusals else self._exact_rows

    @property
    def num_cache_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        return self.num_blocks * self.kv_cache.block_size

    @property
    def cache_dtype(self) -> str:
        """PyTorch's name of the KV cache's dtype."""
        return str(self.kv_cache.dtype).removeprefix("torch.")

    def record_steps(
        self,
        limits: SchedulerConfig,
        recorder: Recorder,
        report: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Enable recordings: from now on, steps are recorded and replayed.

        Args:
            limits: of a step.
            recorder: for the cache's device.
            report: as `RecordedSteps.report`.
        """
        self._sampled = SampledTokens(limits.max_logits + 1, self.device)
        self.recorded = RecordedSteps(
            self.model,
            self.kv_cache,
            recorder,
            self._sampled,
            limits,
            self.sharing_rule,
            executor=self.executor,
            deterministic=self.deterministic,
        )
        self.recorded.report = report

    def use_idle_time(self) -> bool:
        """Record the steps of one bucket; return whether any bucket was waiting for a recording."""
        if self.recorded is not None and self.recorded.record_next():
            return True
        if self._grammars is not None:
            self._grammars.prepare()
        return False

    def compile_grammar(self, sampling: SamplingParams) -> Future[Matcher]:
        """Start to compile the grammar of a request on another thread."""
        assert self._grammars is not None
        return self._grammars.compile(sampling)

    def forget(self, request_id: int) -> None:
        """Drop the token history of a sequence that ended; unknown ids are ignored."""
        self._histories.pop(request_id, None)

    def recover(self, error: Exception) -> bool:
        """Release memory after a step that ran out of it, and check that the device still works.

        Returns:
            Whether later steps can succeed. An illegal memory access leaves a CUDA context unusable.
        """
        if self.executor.is_shared:
            return False  # the other ranks may be in another step, or wait for this one
        out_of_memory = is_out_of_memory(error)
        if out_of_memory:
            traceback.clear_frames(error.__traceback__)  # the frames hold the step's tensors
        try:
            if out_of_memory:
                release_cached(self.device)
            if self.device.type == "cuda":
                # An error's type does not tell whether it is fatal, but every call on a broken context fails.
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute a step and wait for its results.

        Args:
            output: see `launch`.
        """
        pending = self.launch(output)
        pending.sample()
        return pending.result()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Start computing the scheduled tokens and sampling one token from each row of logits.

        Args:
            output: at least one scheduled sequence; its blocks are allocated. Input tokens that the host does not know
                yet must be tokens that the previously launched step samples.
        """
        decode, prefill = output.decode, output.prefill
        needs = self._needs.of(decode)
        if prefill:
            needs |= needs_of_prompts(prefill)
        greedy = needs.all_argmax
        sampling, rows = ([], []) if greedy else self._sampling_rows(decode, prefill)
        waits = any(
            row.parameters.needs_history and sequence.num_tokens_in_flight
            for row, sequence in zip(rows, sampling, strict=False)
        )
        prompts: dict[int, PromptLogprobs] = {}
        computed = None
        if self.recorded is not None and not needs.any_scored:
            computed = self.recorded.compute(decode, prefill)
        if computed is None:
            computed, prompts = self._compute(output, scored=needs.any_scored)
        self._sampled.note(decode, prefill)
        if greedy and suffices(computed, logprobs=needs.logprobs):
            return GreedyStep(computed, decode, prefill, logprobs=needs.logprobs)
        num_logits = [s.num_logits for s in prefill]
        if not (decode.num_logits or any(num_logits)):
            return SampledStep(None, 0, num_logits, prompts, feeds_next=True)
        parts = [part.logits for part in computed]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        if greedy:
            sampling, rows = self._sampling_rows(decode, prefill)

        self._planned = planned = self._sampler.plan(logits, rows) if waits else None

        def sample() -> SampledStep:
            masks, errors = self._masks(rows, sampling, has_drafts=decode.drafts is not None)
            tokens = self._sampler.begin(logits, rows, masks, planned)
            feeds_next = self._keep(decode, tokens)
            # The host keeps some of the tokens of a row with a draft.
            follows = masks is not None and decode.drafts is None
            advance = functools.partial(self._advance, rows, sampling) if follows else None
            return SampledStep(
                tokens, decode.num_logits, num_logits, prompts, feeds_next, errors, advance
            )

        return WaitingStep(sample) if waits else sample()

    def pack(
        self, output: SchedulerOutput, sharing_rule: SharingRule | None, *, scored: bool = False
    ) -> PackedStep:
        """Pack a step that has no recording into its exact bucket.

        Args:
            output: at least one scheduled sequence; its blocks are allocated.
            sharing_rule: decides whether the decode sequences' shared prefix is read once; None for never.
            scored: whether the tokens of prompts are scored for the sequences that requested it.
        """
        decode, prefill, block_size = output.decode, output.prefill, self.kv_cache.block_size
        shared = shared_blocks(decode, block_size, sharing_rule)
        bucket = exact_bucket(
            decode,
            prefill,
            block_size,
            shared,
            has_states=self._has_states,
            exact_rows=self.exact_rows,
        )
        if decode and is_exact(bucket, self.exact_rows) and not scored:
            rows = padded_rows(bucket.rows)
            bucket = msgspec.structs.replace(bucket, rows=rows, num_logits=rows)
        if scored:
            bucket = scored_bucket(bucket, decode, prefill)
        packed = self._inputs.pop(bucket, None) or PackedStep(bucket, block_size, self.device)
        self._inputs[bucket] = packed
        if len(self._inputs) > _KEPT_INPUTS:
            self._inputs.popitem(last=False)
        packed.pack(decode, prefill, self._sampled)
        return packed

    def attention_problems(self) -> list[AttentionProblem]:
        """Return the attention problem of every kind of layer and phase."""
        return self.model.attention.problems(
            self.kv_cache.block_size, self.kv_cache.kv_dtype, deterministic=self.deterministic
        )

    @property
    def state_kernels(self) -> StateKernels:
        """How steps compute states of fixed size."""
        return state_kernels(self.model.network, self.model.dtype_name, detect(self.device))

    def describe_plan(self) -> PlanReport:
        """Report the executor and the kernels of every kind of step, and the reasons for them."""
        cache = self.kv_cache
        return explain_model(
            self.model,
            cache.block_size,
            detect(self.device),
            cache.kv_dtype,
            deterministic=self.deterministic,
        )

    def _compute(
        self, output: SchedulerOutput, *, scored: bool
    ) -> tuple[list[StepOutput], dict[int, PromptLogprobs]]:
        """Compute a step without a recording; also the prompt log-probabilities that sequences requested."""
        packed = self.pack(output, self.sharing_rule, scored=scored)
        sampled = None
        if packed.reads_sampled or self.device.type == "cuda":
            sampled = self._sampled.ids
        computed = self.executor.step(packed.input, sampled)
        num_logits = output.decode.num_logits + sum([s.num_logits for s in output.prefill])
        if num_logits < packed.input.bucket.num_logits:
            computed = computed.first(num_logits)
        return [computed], _prompt_logprobs(output, computed.scores)

    def _find_sharing_rule(self) -> SharingRule | None:
        """Return the rule that decides whether a step reads a shared prefix once; None if no layer supports it."""
        arch = detect(self.device)
        takers = [
            problem
            for problem in self.attention_problems()
            if problem.phase is Phase.DECODE and takes_shared_prefix(problem, arch)
        ]
        if not takers:
            return None
        # Only full-attention layers support it, and those of a model all have the same problem.
        return functools.partial(shared_prefix_is_faster, takers[0], arch)

    def _keep(self, decode: DecodeRows, tokens: PendingTokens) -> bool:
        """Keep sampled tokens on the device; return whether the next step can be launched on them.

        It cannot after a step with a draft, since the host decides which of the draft's tokens are kept.
        """
        if decode.drafts is not None:
            return False
        self._sampled.put(tokens.tokens)
        if self.device.type == "cuda":  # elsewhere the host knows all tokens of a step's input
            self.executor.share_tokens(self._sampled.ids, len(tokens.tokens))
        return tokens.feeds_next

    def _sampling_rows(
        self, decode: DecodeRows, prefill: TypingSequence[ScheduledSequence]
    ) -> tuple[list[Sequence], list[SamplingRow]]:
        """Return the sequence of each row of logits of a step, and its input of the sampler."""
        prompts = (s.sequence for s in prefill for _ in range(s.num_logits))
        sampling = [*decode.sampling_sequences, *prompts]
        rows: list[SamplingRow] = []
        if decode.drafts is None:
            sequences = decode.batch.sequences[: decode.num_sampling]
            pairs = zip(sequences, decode.starts, strict=False)
            rows = [SamplingRow(it.sampling, at + 1, self._history(it)) for it, at in pairs]
        else:
            prefill = (*decode, *prefill)
        for s in prefill:
            rows += [
                SamplingRow(s.sequence.sampling, position, self._history_before(s, position))
                for position in s.sampled_positions
            ]
        return sampling, rows

    def _history(self, sequence: Sequence) -> TokenHistory:
        """Return the token history of a sequence, which is kept between steps."""
        history = self._histories.get(sequence.request_id)
        if history is None:
            history = TokenHistory(sequence.token_ids, sequence.num_prompt_tokens)
            self._histories[sequence.request_id] = history
        return history

    def _history_before(self, s: ScheduledSequence, position: int) -> TokenHistory:
        """Return the tokens before a position that a row of a step samples, those of its draft included."""
        history, known = self._history(s.sequence), s.sequence.token_ids
        if not s.sequence.sampling.needs_history:
            return history
        if position < len(known):
            return TokenHistory(known[:position], s.sequence.num_prompt_tokens)
        drafted = s.draft[: position - len(known)]
        return history.followed_by(drafted) if drafted else history

    def _masks(
        self, rows: list[SamplingRow], sequences: list[Sequence], *, has_drafts: bool
    ) -> tuple[RowMasks | None, dict[int, str]]:
        """Return the masks of the rows with a grammar, None for none; and by row why some have none."""
        matchers: list[tuple[int, FollowedMatcher]] = []
        for i, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            if sequence.matcher is None:
                continue
            if has_drafts or row.position != len(sequence.token_ids):
                matcher = _matcher_before(sequence, row)
            elif sequence.status is SequenceStatus.FINISHED:
                continue
            else:
                matcher = cast("FollowedMatcher", sequence.matcher)
            if matcher is not None:
                matchers.append((i, matcher))
        if not matchers:
            return None, {}
        assert self._grammars is not None
        masks = self._grammars.compute_masks([matcher for _, matcher in matchers])
        slots, errors = [-1] * len(rows), {}
        for i, matcher in matchers:
            if matcher.has_stopped and (error := matcher.error):
                errors[i] = error
            else:
                slots[i] = matcher.slot
        return RowMasks(masks, slots), errors

    def _advance(
        self,
        rows: list[SamplingRow],
        sequences: list[Sequence],
        tokens: TypingSequence[SampledToken],
    ) -> None:
        """Let the grammars of sequences accept their tokens ahead of the commit."""
        pairs: list[tuple[FollowedMatcher, int]] = []
        for row, sequence, token in zip(rows, sequences, tokens, strict=True):
            matcher, token_id = sequence.matcher, token.token_id
            if (
                matcher is None
                or token_id is None
                or row.position != len(sequence.token_ids)  # void
                or token_id in sequence.end_token_ids
                or sequence.status is SequenceStatus.FINISHED
            ):
                continue
            pairs.append((cast("FollowedMatcher", matcher), token_id))
        if pairs:
            assert self._grammars is not None
            # The next step's rows are known: they are prepared while other processes follow the grammars.
            meanwhile = self._planned.prepare if self._planned is not None else None
            self._grammars.advance(pairs, meanwhile)


def _prompt_logprobs(
    output: SchedulerOutput, scores: PromptScores | None
) -> dict[int, PromptLogprobs]:
    """Divide the scores of a step among the sequences that requested them, by request id."""
    results: dict[int, PromptLogprobs] = {}
    if scores is None:
        return results
    logprobs, tops = iter(scores.logprobs), iter(scores.top_tokens)
    for s in (*output.decode, *output.prefill):
        if scores_prompt(s.sequence):
            found = list(itertools.islice(logprobs, len(scored_tokens(s))))
            count = s.sequence.sampling.prompt_top_logprobs
            top = [it[:count] for it in itertools.islice(tops, len(found))]
            results[s.sequence.request_id] = PromptLogprobs(s.start, found, top if count else [])
    return results


def _matcher_before(sequence: Sequence, row: SamplingRow) -> FollowedMatcher | None:
    """Return the state of a sequence's grammar before the token of a row; None if the row needs no mask.

    That is a row whose token is not kept: the sequence has ended meanwhile, or has a token at the row's position, or
    its grammar does not allow the draft before it, or ends with it.
    """
    if sequence.status is SequenceStatus.FINISHED or row.position < sequence.num_tokens:
        return None
    matcher = cast("FollowedMatcher", sequence.matcher)
    drafted = row.history.token_ids[sequence.num_tokens : row.position]
    if not drafted:
        return matcher
    matcher = matcher.copy()
    return matcher if all(map(matcher.accept, drafted)) and not matcher.is_complete else None
