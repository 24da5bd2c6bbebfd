"""The completions of one request: submits them to the engine, and counts tokens and time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from server.engine.core.request import MAX_DRAFT_TOKENS, FinishReason, GenerateRequest
from server.http.body.request_options import RequestOptions
from server.http.metrics.usage import RequestUsage
from server.http.reply.completion import Completion, Prompt, StopStrings
from server.http.reply.receipts import PendingReceipt
from server.http.request_id import current_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.sampling.parameters import SamplingParams
    from server.engine.core.messages import EngineInfo
    from server.http.context import AppContext
    from server.http.metrics.records import RequestRecord
    from server.http.text.structured_output import CompiledConstraint
    from server.receipts.record import Receipt

GENERATION = "tessera.generation"
"""Key of a request's `Generation` in its ASGI scope, from its submission on."""

_SEEDS = 2**64
_COMPLETE = (FinishReason.EOS, FinishReason.STOP)
_DEFAULTS = RequestOptions()


class Timings(NamedTuple):
    """How long the parts of a request took, in seconds.

    Attributes:
        total: since the request was received.
        validation: until it was submitted to the engine.
        queue: from then until its first step.
        inference: from then on.
    """

    total: float
    validation: float
    queue: float
    inference: float


class Generation:
    """The completions of one request while the engine generates them. The creator must always call `abort` at the end.

    Args:
        context: the application's context.
        prompts: the prompts to continue.
        completions_per_prompt: completions of each prompt. The first has the seed of the sampling parameters, each
            further one the next higher seed.
        stop: strings that end a completion.
        keep_tokens: whether `finish` keeps the tokens in addition to the text.
        skip_special_tokens: whether special tokens add no text.
        options: how the engine schedules the completions.
        constraint: on the texts; None for none.

    Attributes:
        completions: in order of the prompts.
        holds_end: whether last events wait until `settled`, since they report what is known only then: what the check
            of the texts has found, or the receipt.
        returned: the completions that the answer consists of: all, unless `select_best` was called.
        prompt_tokens: tokens of the prompts; each prompt counts once.
        warnings: a sentence for each schema that the grammar enforces in part, and for a priority that the client may
            not have; when all has ended, also for each way in which a complete text violates its schema, and for what
            the receipt cannot promise.
        submitted: when the prompts were submitted to the engine, `time.perf_counter` seconds.

    Raises:
        OverloadedError: the request would wait too long.
        UnavailableError: the engine is not ready, and requests do not wait for it.
    """

    def __init__(
        self,
        context: AppContext,
        prompts: Sequence[Prompt],
        *,
        completions_per_prompt: int = 1,
        stop: StopStrings,
        keep_tokens: bool = False,
        skip_special_tokens: bool = True,
        options: RequestOptions = _DEFAULTS,
        constraint: CompiledConstraint | None = None,
    ) -> None:
        self.submitted = time.perf_counter()
        self._context = context
        self.prompt_tokens = sum([len(prompt.token_ids) for prompt in prompts])
        self.completions: list[Completion] = []
        self._per_prompt = completions_per_prompt
        self._keep_tokens = keep_tokens
        self._constraint = constraint
        self.warnings = () if constraint is None else constraint.warnings
        self._checked = not self.warnings
        self.holds_end = bool(self.warnings) or options.receipt
        self._receipt: PendingReceipt | None = None
        request = current_request()
        lowest = request.limits.lowest_priority
        if options.priority < lowest:
            self.warnings += (f"`priority` below {lowest} orders only requests of the same client",)
        self.has_prediction = bool(options.prediction)
        self.warnings += _draft_warnings(options, context.engine_info())
        deadline, timeout_ms = None, options.timeout_ms or request.limits.longest_timeout_ms
        if timeout_ms is not None:
            deadline = request.arrived + timeout_ms / 1000
        lengths = [
            (len(prompt.token_ids), prompt.sampling.max_new_tokens)
            for prompt in prompts
            for _ in range(completions_per_prompt)
        ]
        adapter = None if request.adapter is None else request.adapter.name
        context.shedding.admit(lengths, context.engine_info(), deadline, request.client, adapter)
        if options.receipt:
            self._receipt = PendingReceipt(
                context.weights,
                context.engine_info(),
                deterministic=options.deterministic,
                adapter=None if request.adapter is None else request.adapter.digest,
            )
        cache_salt = options.salt_within(request.cache_namespace)
        try:
            for prompt in prompts:
                for i in range(completions_per_prompt):
                    sampling = _sampling(prompt, i)
                    submitted = GenerateRequest(
                        request_id=context.client.next_request_id(),
                        prompt_token_ids=prompt.token_ids,
                        sampling=sampling,
                        external_id=request.id,
                        priority=max(options.priority, lowest),
                        client_priority=options.priority,
                        deadline=deadline,
                        cache_salt=cache_salt,
                        client=request.client,
                        deterministic=options.deterministic,
                        max_draft_tokens=options.max_draft_tokens,
                        prediction=list(options.prediction),
                        adapter=request.adapter,
                    )
                    stream = context.submit(submitted)  # first, so that the engine can start
                    stream.on_start = context.shedding.enqueue(
                        request.client, len(prompt.token_ids), sampling.max_new_tokens
                    )
                    self.completions.append(
                        Completion(
                            context.tokenizer,
                            prompt,
                            stream,
                            sampling,
                            stop,
                            skip_special_tokens=skip_special_tokens,
                            keep_events=options.receipt,
                        )
                    )
        except BaseException:
            self.abort()
            raise
        self.returned = self.completions

    def abort(self) -> None:
        """Free what the engine holds for this request. Does nothing for completions that have ended."""
        for completion in self.completions:
            completion.stream.abort()
            if (leave := completion.stream.on_start) is not None:
                leave()

    def expire(self) -> None:
        """End what still runs as at its deadline; the engine drops it."""
        for completion in self.completions:
            completion.stream.expire()

    async def accepted(self) -> None:
        """Wait for the engine while it is being started again; the answer must not begin before.

        Raises:
            UnavailableError: it was not ready in time.
        """
        for completion in self.completions:
            if not await completion.stream.accepted():
                raise self._context.unavailable()

    async def finish(self, record: RequestRecord) -> None:
        """Wait until every completion has ended.

        Raises:
            GenerationError: one of them failed.
        """
        parts = [c.finish(record.clock(), keep_tokens=self._keep_tokens) for c in self.completions]
        # The usual single completion needs no task of its own.
        await (parts[0] if len(parts) == 1 else asyncio.gather(*parts))
        await self._complete()

    async def _complete(self) -> None:
        """Find out what only the end of the reply reports."""
        if self._receipt is not None and not self._receipt.is_complete:
            await self._receipt.complete(self.completions)
            self.warnings += self._receipt.warnings
        if self._checked or self._constraint is None:
            return
        self._checked = True
        complete = [c.text for c in self.completions if c.finish_reason in _COMPLETE]
        self.warnings += await self._constraint.violations(self._context, complete)

    @property
    def max_new_tokens(self) -> int:
        """The largest limit of the tokens of a completion."""
        return max([completion.prompt.sampling.max_new_tokens for completion in self.completions])

    @property
    def settled(self) -> bool:
        """Whether `usage`, `warnings` and `receipt` are complete: the engine has reported what each completion used."""
        if not self._checked or (self._receipt is not None and not self._receipt.is_complete):
            return False
        return all(completion.stream.finished for completion in self.completions)

    async def settle(self) -> None:
        """Wait until `settled`. Call when all completions have ended."""
        for completion in self.completions:
            await completion.stream.settle()
        await self._complete()

    def usage(self) -> RequestUsage:
        """Return what the request used, of all completions; final if `settled`."""
        queue = prefill = decode = device = blocks = 0.0
        computed = cached = recomputed = steps = drafted = accepted = 0
        for completion in self.completions:
            stream = completion.stream
            used = stream.usage
            queue = max(queue, stream.queue_seconds)
            prefill = max(prefill, used.prefill_seconds)
            decode = max(decode, used.decode_seconds)
            device += used.device_seconds
            blocks += used.block_seconds
            computed += used.num_computed_prompt_tokens
            cached += used.num_cached_prompt_tokens
            recomputed += used.num_recomputed_tokens
            steps += used.num_steps
            drafted += used.num_draft_tokens
            accepted += used.num_accepted_tokens
        return RequestUsage(
            queue_ms=_milliseconds(queue),
            prefill_ms=_milliseconds(prefill),
            decode_ms=_milliseconds(decode),
            computed_prompt_tokens=computed,
            cached_prompt_tokens=cached,
            recomputed_tokens=recomputed,
            steps=steps,
            draft_tokens=drafted,
            accepted_tokens=accepted,
            device_seconds=round(device, 9),
            kv_block_seconds=round(blocks, 6),
        )

    @property
    def predicted_tokens(self) -> tuple[int, int]:
        """Tokens of the prediction that are in the answers, and that were computed and are not; final if `settled`."""
        used = [completion.stream.usage for completion in self.completions]
        accepted = sum([it.num_accepted_predicted_tokens for it in used])
        return accepted, sum([it.num_predicted_tokens for it in used]) - accepted

    @property
    def receipt(self) -> Receipt | UnsetType:
        """The receipt of the returned completions; UNSET if none was asked for. Valid if `settled`."""
        return UNSET if self._receipt is None else self._receipt.build(self.returned)

    def select_best(self, count: int) -> list[Completion]:
        """Keep only the completions of each prompt with the highest mean log-probability. Call after `finish`.

        Args:
            count: completions to keep for each prompt, in `returned`.

        Returns:
            The other completions.
        """
        if count >= self._per_prompt:
            return []
        self.returned = []
        for i in range(0, len(self.completions), self._per_prompt):
            ranked = sorted(
                self.completions[i : i + self._per_prompt],
                key=lambda completion: completion.mean_logprob,
                reverse=True,
            )
            self.returned += ranked[:count]
        return [c for c in self.completions if c not in self.returned]

    @property
    def completion_tokens(self) -> int:
        """Tokens of the returned completions so far."""
        return sum([completion.num_tokens for completion in self.returned])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from the engine's prefix cache; valid once each prompt has its first token."""
        return sum([c.stream.num_cached_tokens for c in self.completions[:: self._per_prompt]])

    @property
    def queue_seconds(self) -> float:
        """How long the first returned completion waited in the engine; valid after its first token."""
        return self.returned[0].stream.queue_seconds

    def timings(self, started: float) -> Timings:
        """Return how long the parts of the request have taken until now.

        Args:
            started: when the request was received, `time.perf_counter` seconds.
        """
        now, queue = time.perf_counter(), self.queue_seconds
        return Timings(
            total=now - started,
            validation=self.submitted - started,
            queue=queue,
            inference=max(0.0, now - self.submitted - queue),
        )


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _sampling(prompt: Prompt, index: int) -> SamplingParams:
    """Return the sampling parameters of a prompt's completion: each has a seed of its own."""
    sampling = prompt.sampling
    if index:
        sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + index) % _SEEDS)
    return sampling


def _draft_warnings(options: RequestOptions, info: EngineInfo) -> tuple[str, ...]:
    """Return what a request asks for and does not get, because it has no drafts or shorter ones."""
    asked = options.max_draft_tokens
    is_possible = info.exact_rows > 1 or options.deterministic
    is_possible = is_possible or info.plan.deterministic.requests == "all"
    why = "" if is_possible else "only deterministic requests have drafts"
    if not info.max_draft_tokens:
        why = "the service has no drafts (--max-draft-tokens 0)"
    if why:
        values = {"prediction": options.prediction, "speculation": asked}
        return tuple(f"`{name}` has no effect: {why}" for name, value in values.items() if value)
    if asked == 0 and options.prediction:
        return ("`prediction` has no effect: `speculation` is switched off",)
    if asked is not None and info.max_draft_tokens < asked < MAX_DRAFT_TOKENS:
        return (f"`speculation.max_tokens` {asked} is limited to {info.max_draft_tokens}",)
    return ()
