"""The engine's loop: schedule, launch, commit, publish. Runs in one thread of the engine process.

On a GPU the loop runs one step ahead: while the device computes a step, the host commits and publishes the results of
the previous step and schedules the next one, so that the device does not wait for the host.

    host      launch n+1 │ wait for n │ commit n, publish n │ schedule and launch n+2 │ wait for n+1 │ ...
    device    ... step n ────────────>│ step n+1 ────────────────────────────────────────────────────>│ ...
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from server.engine.core.admission import AdmissionError
from server.engine.core.messages import (
    AbortRequests,
    EngineInfo,
    EngineMessage,
    EngineStats,
    FrontEndMessage,
    SequenceStarted,
    Shutdown,
    StepMessage,
)
from server.engine.core.request import FinishReason, GenerateRequest, TokenEvent
from server.engine.core.sequence import Sequence
from server.engine.core.step import PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from server.engine.core.scheduler import Scheduler
    from server.engine.core.step import (
        PendingStep,
        SchedulerOutput,
        StepResult,
        StepRunner,
    )

log = logging.getLogger("tessera.engine")

_IDLE_DELAY_SECONDS: Final = 0.02
"""Time without work before preparatory work starts. A client that waits for each reply sends its next request sooner;
otherwise that request would wait for the preparatory work.
"""


class EngineChannel(Protocol):
    """The engine's side of the connection to the front end."""

    def send(self, message: EngineMessage) -> None:
        """Queue a message; never blocks."""

    def receive(self, *, wait: float) -> Iterable[FrontEndMessage]:
        """Return all messages that have arrived; if there are none, wait up to `wait` seconds for one."""


class _Step(NamedTuple):
    """A step between its launch and its results."""

    output: SchedulerOutput
    started: list[SequenceStarted]
    pending: PendingStep


class _NotLaunched:
    """A step whose launch raised."""

    feeds_next = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        """Raise the error of the launch."""
        raise self._error


class Engine:
    """Owns the scheduler and the model runner; no other object uses them.

    Args:
        scheduler: decides what each step computes.
        runner: computes the steps.
        channel: receives requests and sends events.
        info: the engine's properties, for the front end.
        runs_ahead: whether a step is launched before the results of the previous one are committed, if it does not
            depend on them. Has no benefit on a CPU, where a launch computes the step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        channel: EngineChannel,
        info: EngineInfo,
        *,
        runs_ahead: bool = False,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._channel = channel
        self._arrivals: dict[int, float] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._runs_ahead = runs_ahead
        self._launched: _Step | None = None
        self._stopping = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work or self._launched is not None

    def run(self) -> None:
        """Serve until a shutdown message arrives. May be called again."""
        self._stopping = False
        while not self._stopping:
            if self.has_work:
                self.receive(wait=0)
                if not self._stopping:
                    self.step()
            elif not self.receive(wait=_IDLE_DELAY_SECONDS):
                self._use_idle_time()

    def _use_idle_time(self) -> None:
        """Let the runner do preparatory work until a message arrives."""
        while not self.receive(wait=0):
            if not self._runner.use_idle_time():
                self.receive(wait=math.inf)
                return

    def receive(self, *, wait: float) -> bool:
        """Handle the messages of the front end.

        Args:
            wait: seconds to wait for a message if none has arrived; `math.inf` waits without a limit.

        Returns:
            Whether there was a message.
        """
        any_came = False
        for message in self._channel.receive(wait=wait):
            any_came = True
            if isinstance(message, GenerateRequest):
                self._add(message)
            elif isinstance(message, AbortRequests):
                self._abort(message.request_ids)
            elif isinstance(message, Shutdown):
                self._stopping = True
        return any_came

    def step(self) -> None:
        """Launch a step and commit the previous one; unless the engine runs ahead, commit the launched step as well."""
        before, self._launched = self._launched, None
        if self._scheduler.has_work and (before is None or before.pending.feeds_next):
            self._launched = self._launch()
        if before is not None:
            self._book(before)
        if self._launched is not None and not self._runs_ahead:
            launched, self._launched = self._launched, None
            self._book(launched)

    def _launch(self) -> _Step | None:
        """Schedule and launch a step; return None if all remaining work is in flight."""
        output = self._scheduler.schedule()
        if not output.num_tokens:
            return None
        started = self._note_started(output)
        pending: PendingStep
        try:
            pending = self._runner.launch(output)
        except Exception as error:
            log.exception("launching a step failed")
            pending = _NotLaunched(error)
        self._scheduler.start(output)
        return _Step(output, started, pending)

    def _book(self, step: _Step) -> None:
        """Wait for the results of a step, then commit and publish them. If the step failed, its sequences end."""
        output, started, pending = step
        try:
            result = pending.result()
        except Exception as error:
            log.exception("a step failed; its sequences end with an error")
            events = self._scheduler.fail(output, "the forward pass failed")
            self._publish(events, started, {})
            if not self._runner.recover(error):
                raise  # the process ends, and its parent starts another one
            return
        prompts = self._collect_prompt_logprobs(output, result.prompt_logprobs)
        self._publish(self._scheduler.commit(output, result.sampled), started, prompts)

    def stats(self) -> EngineStats:
        """Return the current gauges and counters."""
        scheduler, blocks = self._scheduler, self._scheduler.block_manager
        used = blocks.num_blocks - blocks.num_free_blocks
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free_blocks,
            kv_usage=used / blocks.num_blocks,
            prefix_cache_query_tokens=scheduler.prefix_cache_query_tokens,
            prefix_cache_hit_tokens=scheduler.prefix_cache_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.num_prompt_tokens,
            generation_tokens=scheduler.num_generated_tokens,
            num_steps=scheduler.num_steps,
        )

    def _add(self, request: GenerateRequest) -> None:
        try:
            self._scheduler.add(Sequence(request))
        except AdmissionError as error:
            event = TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=str(error))
            self._send([(request.request_id, event)], [], {})
        else:
            self._arrivals[request.request_id] = time.monotonic()

    def _abort(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self._scheduler.abort(request_id)
            self._forget(request_id)
        self._publish([], [], {})

    def _forget(self, request_id: int) -> None:
        self._runner.forget(request_id)
        self._arrivals.pop(request_id, None)
        self._prompt_logprobs.pop(request_id, None)

    def _note_started(self, output: SchedulerOutput) -> list[SequenceStarted]:
        now = time.monotonic()
        return [
            SequenceStarted(
                sequence.request_id,
                now - self._arrivals[sequence.request_id],
                sequence.num_cached_tokens,
            )
            for sequence in output.first_scheduled
        ]

    def _collect_prompt_logprobs(
        self, output: SchedulerOutput, computed: dict[int, PromptLogprobs]
    ) -> dict[int, PromptLogprobs]:
        """Collect the chunks of each prompt; return the prompts that this step completed."""
        for request_id, chunk in computed.items():
            if request_id not in self._arrivals:
                continue  # it ended while the step was computed
            # A preempted prompt is computed again from its beginning.
            kept = self._prompt_logprobs.get(request_id, PromptLogprobs(0, []))
            self._prompt_logprobs[request_id] = PromptLogprobs(
                0,
                kept.logprobs[: chunk.start] + chunk.logprobs,
                kept.top_tokens[: chunk.start] + chunk.top_tokens,
            )
        if not self._prompt_logprobs:
            return {}
        return {
            s.sequence.request_id: self._prompt_logprobs.pop(s.sequence.request_id)
            for s in (*output.decode, *output.prefill)
            if s.num_logits and s.sequence.request_id in self._prompt_logprobs
        }

    def _publish(
        self,
        events: list[tuple[int, TokenEvent]],
        started: list[SequenceStarted],
        prompt_logprobs: dict[int, PromptLogprobs],
    ) -> None:
        """Send the events of a step to the front end, and drop the state of the sequences that ended."""
        for request_id, event in events:
            if event.finish_reason is not None:
                self._forget(request_id)
        self._send(events, started, prompt_logprobs)

    def _send(
        self,
        events: list[tuple[int, TokenEvent]],
        started: list[SequenceStarted],
        prompt_logprobs: dict[int, PromptLogprobs],
    ) -> None:
        """Send one message for all sequences of a step."""
        indexed = list(enumerate(event for _, event in events))
        self._channel.send(
            StepMessage(
                request_ids=[request_id for request_id, _ in events],
                token_ids=[-1 if event.token_id is None else event.token_id for _, event in events],
                finish_reasons=[int(event.finish_reason or 0) for _, event in events],
                logprobs={i: event.logprob for i, event in indexed if event.logprob is not None},
                top_tokens={i: list(event.top_tokens) for i, event in indexed if event.top_tokens},
                errors={i: event.error for i, event in indexed if event.error is not None},
                started=started,
                prompt_logprobs={i: prompt.logprobs for i, prompt in prompt_logprobs.items()},
                prompt_top_tokens={
                    i: prompt.top_tokens
                    for i, prompt in prompt_logprobs.items()
                    if prompt.top_tokens
                },
                stats=self.stats(),
            )
        )
