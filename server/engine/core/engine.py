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

import msgspec

from server.engine.core.grammar_queue import GrammarQueue
from server.engine.core.messages import (
    AbortRequests,
    EngineInfo,
    EngineMessage,
    EngineStats,
    FrontEndMessage,
    SequenceStarted,
    Shutdown,
)
from server.engine.core.progress import Activity, Progress
from server.engine.core.reports import StatsReporter, step_message
from server.engine.core.request import FinishReason, GenerateRequest, TokenEvent
from server.engine.core.request_checks import (
    DuplicateRequestError,
    InvalidRequestError,
    RefusedError,
    check_request,
)
from server.engine.core.results.step_events import StepEvents
from server.engine.core.results.step_retry import STEP_FAILED, error_text, retry_step
from server.engine.core.sequence import Sequence
from server.engine.core.step import PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from server.engine.core.adapter_pool import AdapterPool
    from server.engine.core.schedule.scheduler import Scheduler
    from server.engine.core.step import PendingStep, SchedulerOutput, StepResult, StepRunner

log = logging.getLogger("tessera.engine")

_IDLE_DELAY_SECONDS: Final = 0.02
"""Time without work before preparatory work starts. A client that waits for each reply sends its next request sooner;
otherwise that request would wait for the preparatory work.
"""


# Constants, since looking a member up takes three times as long as `Progress.begin`.
_RECORDING: Final = Activity.RECORDING
_IDLE: Final = Activity.IDLE
_MESSAGES: Final = Activity.MESSAGES
_SCHEDULING: Final = Activity.SCHEDULING
_LAUNCHING: Final = Activity.LAUNCHING
_WAITING: Final = Activity.WAITING
_IDLE_CHECK_SECONDS: Final = 1.0
"""Time without work before the bookkeeping is checked; nothing changes after that until a message arrives."""
_MOST_FAILED_STEPS: Final = 5
"""Steps in sequence of which no row could be computed, after which the engine process ends and is restarted. A few
requests that each make a step of their own fail must not suffice.
"""


class EngineChannel(Protocol):
    """The engine's side of the connection to the front end."""

    def send(self, message: EngineMessage) -> None:
        """Queue a message; never blocks."""

    def receive(self, *, wait: float) -> Iterable[FrontEndMessage]:
        """Return all messages that have arrived; if there are none, wait up to `wait` seconds for one."""


class _Step(NamedTuple):
    """A step between its launch, at `launched` of `time.monotonic`, and its results."""

    output: SchedulerOutput
    started: list[SequenceStarted]
    pending: PendingStep
    launched: float


class _NoResultsError(Exception):
    """A step has no results.

    Attributes:
        cause: the error of its launch, which was logged; None if it was launched on the results of a step that failed.
    """

    def __init__(self, cause: Exception | None) -> None:
        super().__init__()
        self.cause = cause


class _NoResults:
    """The pending results of a step that has none."""

    feeds_next = False

    def __init__(self, cause: Exception | None) -> None:
        self._cause = cause

    def sample(self) -> None:
        """Do nothing."""

    def result(self) -> StepResult:
        """Raise a `_NoResultsError`."""
        raise _NoResultsError(self._cause)


class Engine:
    """Owns the scheduler and the model runner; no other object uses them.

    Attributes:
        info: the engine's properties.
        progress: what the loop is doing; may be replaced before `run`.

    Args:
        scheduler: decides what each step computes.
        runner: computes the steps.
        channel: receives requests and sends events.
        info: the engine's properties, for the front end.
        runs_ahead: whether a step is launched before the results of the previous one are committed, if it does not
            depend on them. Has no benefit on a CPU, where a launch computes the step.
        adapters: of its sequences; None if they have none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        channel: EngineChannel,
        info: EngineInfo,
        *,
        runs_ahead: bool = False,
        adapters: AdapterPool | None = None,
    ) -> None:
        self.info = info
        self.progress = Progress()
        self._scheduler = scheduler
        self._runner = runner
        self._channel = channel
        self._compiling = GrammarQueue(runner.compile_grammar)
        self._adapters = adapters
        self._stats = StatsReporter(scheduler, self._compiling, info.engine, adapters)
        self._arrivals: dict[int, float] = {}
        self._deadlines: dict[int, float] = {}
        self._next_deadline = math.inf  # at most the earliest of them
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._runs_ahead = runs_ahead
        self._launched: _Step | None = None
        self._device_free_at = -math.inf  # when the results of the newest step arrived
        self._num_without_success = 0  # steps in sequence of which no row could be computed
        self._stopping = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._scheduler.has_work or self._launched or self._compiling or self._adapters)

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
            self.progress.begin(_RECORDING)
            if not self._runner.use_idle_time():
                if not self.receive(wait=_IDLE_CHECK_SECONDS):
                    self.check_idle()
                    self.receive(wait=math.inf)
                return

    def check_idle(self) -> None:
        """Check the bookkeeping of an engine without work; log and count contradictions."""
        found = self._scheduler.idle_violations()
        if self._adapters is not None:
            found += self._adapters.idle_violations()
        if self._arrivals or self._deadlines or self._prompt_logprobs:
            found.append(f"{len(self._arrivals)} open requests, expected none")
        if found:
            log.error("the engine's bookkeeping is wrong: %s", "; ".join(found))
            self._stats.num_invariant_violations += len(found)
            self._publish(StepEvents(), [], {})

    def receive(self, *, wait: float) -> bool:
        """Handle the messages of the front end.

        Args:
            wait: seconds to wait for a message if none has arrived; `math.inf` waits without a limit.

        Returns:
            Whether there was a message.
        """
        any_came = False
        if wait:
            self.progress.begin(_IDLE)
        for message in self._channel.receive(wait=wait):
            any_came = True
            self.progress.begin(_MESSAGES)
            if isinstance(message, GenerateRequest):
                self._add(message)
            elif isinstance(message, AbortRequests):
                self._abort(message)
            elif isinstance(message, Shutdown):
                self._stopping = True
        return any_came

    def step(self) -> None:
        """Launch a step and commit the previous one; unless the engine runs ahead, commit the launched step as well."""
        self.progress.begin(_SCHEDULING)
        if self._compiling:
            self._add_compiled()
        if self._adapters:
            self._add_loaded(self._adapters)
        before, self._launched = self._launched, None
        if self._deadlines:
            self._end_expired()
        if self._scheduler.has_work and (before is None or self._follows(before)):
            self._launched = self._launch()
        if before is not None:
            self._book(before)
        elif self._launched is not None:
            self._sample()
        if self._launched is not None and not self._runs_ahead:
            launched, self._launched = self._launched, None
            self._book(launched)

    def _follows(self, before: _Step) -> bool:
        """Return whether the next step is launched before the results of the one before are known.

        If drafts will probably pay, it waits for them: a row whose token is not known has no draft.
        """
        return before.pending.feeds_next and not self._scheduler.expects_drafts

    def _launch(self) -> _Step | None:
        """Schedule and launch a step; return None if all remaining work is in flight."""
        self._scheduler.accounting.now = launched = time.monotonic()
        self._scheduler.waits_for_slots = bool(self._adapters and self._adapters.is_full)
        output = self._scheduler.schedule()
        if late := self._scheduler.take_late():
            self._publish(StepEvents(late), [], {})
        if not output.num_tokens:
            return None
        started = self._note_started(output, launched)
        pending: PendingStep
        self.progress.begin(_LAUNCHING, output.num_tokens)
        try:
            pending = self._runner.launch(output)
        except Exception as error:
            log.exception("launching step %d failed", output.step)
            pending = _NoResults(error)
        self._scheduler.start(output)
        return _Step(output, started, pending, launched)

    def _sample(self) -> None:
        """Let the launched step, if there is one, start to sample: the results of the step before are committed."""
        if self._launched is None:
            return
        try:
            self._launched.pending.sample()
        except Exception as error:
            log.exception("sampling in step %d failed", self._launched.output.step)
            self._launched = self._launched._replace(pending=_NoResults(error))

    def _book(self, step: _Step) -> None:
        """Wait for the results of a step, then commit and publish them. If there are none, compute the step again.

        The launched step samples between the two, so that the device does not wait for the message to be sent.
        """
        output, started, pending, _ = step
        self.progress.begin(_WAITING, output.num_tokens)
        try:
            result = pending.result()
        except _NoResultsError as error:
            self._book_again(step, error.cause)
            return
        except Exception as error:
            log.exception("step %d failed", output.step)
            self._book_again(step, error)
            return
        if self._num_without_success:
            self._num_without_success = 0
        seconds = self._device_seconds(step)
        self.progress.end_step(output.num_tokens, seconds)
        prompts = self._collect_prompt_logprobs(output, result.prompt_logprobs)
        events = self._scheduler.commit(output, result.sampled, seconds)
        self._sample()
        self._publish(events, started, prompts)

    def _book_again(self, step: _Step, error: Exception | None) -> None:
        """Compute a step that has no results again; only the sequences that make it fail end with an error.

        Where a step cannot be computed again, because it has replaced states, all of them begin again at snapshots.

        The launched step has read tokens, keys and values of this one, so it has to be computed again as well.

        Args:
            step: the step.
            error: why it has no results; None if it was launched on the results of a step that failed.

        Raises:
            Exception: the device does not work any more, or step after step fails. The process ends, and its parent
                starts another one.
        """
        output = step.output
        if self._launched is not None:
            self._launched = self._launched._replace(pending=_NoResults(None))
        if error is not None:
            self._stats.num_failed_steps += 1
            if not self._runner.recover(error):
                seconds = self._device_seconds(step)
                events = self._scheduler.fail(output, STEP_FAILED, seconds)
                self._publish(events, step.started, {})
                raise error
        if not self._scheduler.repeats_steps:
            self._begin_again(step, error)
            return
        with self._scheduler.not_started(output) as rows:
            retried = retry_step(self._runner, output.step, rows, self.progress)
        seconds = self._device_seconds(step)
        prompts = self._collect_prompt_logprobs(output, retried.prompt_logprobs)
        events = self._scheduler.commit_parts(output, retried.results, seconds)
        self._publish(events, step.started, prompts)
        if retried.error is None:
            self._num_without_success = 0
            return
        self._note_without_success(retried.error, is_broken=retried.is_broken)

    def _begin_again(self, step: _Step, error: Exception | None) -> None:
        """Preempt the sequences of a step that failed; one that makes steps fail alone ends with an error.

        Args:
            step: the step.
            error: see `_book_again`.

        Raises:
            Exception: as `_book_again`.
        """
        seconds, reason = self._device_seconds(step), error_text(error)
        events = self._scheduler.begin_again(
            step.output, reason, seconds, is_cause=error is not None
        )
        self._publish(events, step.started, {})
        if error is not None and events.ended:
            self._note_without_success(error)

    def _note_without_success(self, error: Exception, *, is_broken: bool = False) -> None:
        """Count a step of which nothing could be computed; raise its error if there were too many."""
        self._num_without_success += 1
        if is_broken or self._num_without_success >= _MOST_FAILED_STEPS:
            log.critical("the engine ends: its model cannot be computed any more")
            raise error

    def _device_seconds(self, step: _Step) -> float:
        """Return the device time of a step whose results have just arrived.

        On a CPU, which computes the step when it is scheduled and launched, this is all of that time. On a GPU it is
        the time since the launch, less the part in which the device computed the step before. The sum over all steps is
        therefore at most the elapsed time.
        """
        now = time.monotonic()
        seconds = now - max(step.launched, self._device_free_at)
        self._scheduler.accounting.now = self._device_free_at = now
        return seconds

    def stats(self) -> EngineStats:
        """Return the current gauges and counters."""
        return self._stats.read()

    def _add(self, request: GenerateRequest) -> None:
        """Admit a request; one that cannot be admitted ends with an error, and no other is affected."""
        if request.request_id in self._arrivals:
            error = str(DuplicateRequestError(request.request_id))
            event = TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=error)
            # Not `_publish`: the state of the other one is kept.
            self._send(StepEvents([(request.request_id, event)]), [], {})
            return
        try:
            self._admit(request)
        except RefusedError as error:
            self._refuse(request.request_id, str(error))
        except Exception:
            log.exception("admitting request %d failed", request.request_id)
            self._scheduler.abort(request.request_id)
            self._refuse(request.request_id, "the request cannot be admitted: an internal error")

    def _admit(self, request: GenerateRequest) -> None:
        check_request(request, self.info.vocab_size)
        if self.info.plan.deterministic.requests == "all":
            request = msgspec.structs.replace(request, deterministic=True)
        sequence = Sequence(request)
        self._arrivals[request.request_id] = time.monotonic()
        if request.deadline is not None:
            self._deadlines[request.request_id] = request.deadline
            self._next_deadline = min(self._next_deadline, request.deadline)
        if request.adapter is not None and self._adapters is None:
            raise InvalidRequestError("the engine has no slots for adapters: set --max-loras")
        if request.sampling.grammar is None:
            self._enqueue(sequence)
        else:
            self._compiling.add(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        """Put a sequence into the queue, once its adapter has a slot.

        Raises:
            RefusedError: see `Scheduler.add`.
        """
        if sequence.adapter is None or self._adapters is None:
            self._scheduler.add(sequence)
            return
        self._scheduler.estimate_output(sequence)
        if self._adapters.add(sequence):
            self._scheduler.add(sequence)

    def _add_loaded(self, adapters: AdapterPool) -> None:
        """Enqueue the sequences whose adapter has a slot; wait a moment for one if there is nothing else to do.

        Queued sequences whose slot shall be another adapter's wait for a slot again.
        """
        idle = not self._scheduler.has_work and self._launched is None
        for sequence, error in adapters.take(wait=idle):
            if error is not None:
                self._refuse(sequence.request_id, error)
                continue
            try:
                self._scheduler.add(sequence)
            except RefusedError as refusal:
                self._refuse(sequence.request_id, str(refusal))
        adapters.return_queued(self._scheduler.withdraw)

    def _add_compiled(self) -> None:
        """Enqueue the sequences whose grammar is compiled; wait a moment for one if there is nothing else to do."""
        idle = not self._scheduler.has_work and self._launched is None
        for sequence, error in self._compiling.take(wait=idle):
            if error is not None:
                self._refuse(sequence.request_id, error)
                continue
            try:
                self._enqueue(sequence)
            except RefusedError as refusal:
                self._refuse(sequence.request_id, str(refusal))

    def _refuse(self, request_id: int, error: str) -> None:
        event = TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=error)
        self._publish(StepEvents([(request_id, event)]), [], {})

    def _end_expired(self) -> None:
        """End the sequences whose deadline has passed, before a step could compute them."""
        now = time.monotonic()
        if now < self._next_deadline:
            return
        events = []
        for request_id, deadline in self._deadlines.items():
            if deadline <= now and (event := self._expire(request_id)) is not None:
                events.append((request_id, event))
        if events:
            self._publish(StepEvents(events), [], {})
        self._next_deadline = min(self._deadlines.values(), default=math.inf)

    def _expire(self, request_id: int) -> TokenEvent | None:
        """End a sequence whose deadline has passed; see `Scheduler.expire`."""
        if self._compiling.remove(request_id) or (
            self._adapters is not None and self._adapters.remove(request_id)
        ):
            return TokenEvent(token_id=None, finish_reason=FinishReason.TIMEOUT)
        return self._scheduler.expire(request_id)

    def _abort(self, message: AbortRequests) -> None:
        self._scheduler.accounting.now = time.monotonic()
        events = []
        for request_id in message.request_ids:
            self._compiling.remove(request_id)
            sequence = self._scheduler.abort(request_id, message.reason)
            self._forget(request_id)
            if sequence is not None and message.reason is not FinishReason.ABORT:
                event = TokenEvent(
                    token_id=None, finish_reason=message.reason, usage=sequence.usage
                )
                events.append((request_id, event))
        self._publish(StepEvents(events), [], {})

    def _forget(self, request_id: int) -> None:
        self._runner.forget(request_id)
        if self._adapters is not None:
            self._adapters.remove(request_id)
            self._adapters.release(request_id)
        self._arrivals.pop(request_id, None)
        self._deadlines.pop(request_id, None)
        self._prompt_logprobs.pop(request_id, None)

    def _note_started(self, output: SchedulerOutput, now: float) -> list[SequenceStarted]:
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
        events: StepEvents,
        started: list[SequenceStarted],
        prompt_logprobs: dict[int, PromptLogprobs],
    ) -> None:
        """Send the events of a step to the front end, and drop the state of the sequences that ended."""
        for request_id in events.ended:
            self._forget(request_id)
        self._send(events, started, prompt_logprobs)

    def _send(
        self,
        events: StepEvents,
        started: list[SequenceStarted],
        prompt_logprobs: dict[int, PromptLogprobs],
    ) -> None:
        """Send one message for all sequences of a step."""
        self._channel.send(step_message(events, started, prompt_logprobs, self._stats))
