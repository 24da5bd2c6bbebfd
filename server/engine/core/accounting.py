"""Accounting: what each sequence uses of the device and of the KV cache.

A step's device time is shared among its sequences by their numbers of scheduled tokens. A block is charged to every
sequence that holds it, for as long as it does; a block that several sequences share therefore counts for each of them.

The work per step does not depend on the number of decoding sequences: `Accounting` keeps the device time that a
sequence with one token in every step would have used, and reads that number when a sequence enters the batch and when
it leaves. Only sequences with more than one token in a step are charged one by one.
"""

from __future__ import annotations

import bisect
from typing import Final

from server.engine.core.request import FinishReason, SequenceUsage

STEP_SECONDS_BOUNDS: Final = (
    0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
"""Upper bounds, inclusive, of the buckets of `StepTimes`; the last bucket has none."""


class StepTimes:
    """Device times of the steps of one kind.

    Attributes:
        counts: steps by bucket of `STEP_SECONDS_BOUNDS`.
        seconds: their sum.
    """

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_SECONDS_BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count a step."""
        self.counts[bisect.bisect_left(STEP_SECONDS_BOUNDS, seconds)] += 1
        self.seconds += seconds


class SequenceAccount:
    """The figures of one sequence; only `Scheduler` and `Accounting` change them.

    While the sequence is in the batch, the steps since it entered are not included.

    Attributes:
        device_seconds: its share of the device time.
        block_seconds: KV blocks times seconds; each block that it holds is included with the negative time at which it
            was allocated.
        num_steps: steps that computed tokens of the sequence.
        num_tokens: tokens that they computed, also those that were computed before.
        num_prompt_tokens: tokens of its prompt.
        num_first_tokens: leading tokens that were computed at least once or taken from the prefix cache.
        num_cached_tokens: those of them that were first taken from the prefix cache.
        num_cached_prompt_tokens: the prompt tokens among these.
        num_draft_tokens, num_accepted_tokens: see `SequenceUsage`.
        num_predicted_tokens, num_accepted_predicted_tokens: likewise.
        draft_is_predicted: whether its draft in flight is from its prediction.
        num_dropped_tokens: tokens of drafts that it has not, or that no step after them needed.
        scheduled_at, first_token_at: `Accounting.now` at these events; None before.
    """

    __slots__ = (
        "_entered", "block_seconds", "device_seconds", "draft_is_predicted", "first_token_at",
        "num_accepted_predicted_tokens", "num_accepted_tokens", "num_cached_prompt_tokens", "num_cached_tokens",
        "num_draft_tokens", "num_dropped_tokens", "num_first_tokens", "num_predicted_tokens", "num_prompt_tokens",
        "num_steps", "num_tokens", "scheduled_at",
    )  # fmt: skip

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.device_seconds = 0.0
        self.block_seconds = 0.0
        self.num_steps = 0
        self.num_tokens = 0
        self.num_first_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_predicted_tokens = self.num_accepted_predicted_tokens = 0
        self.draft_is_predicted = False
        self.num_dropped_tokens = 0
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self._entered: tuple[float, int] | None = None

    def charge(self, num_tokens: int, price: float, num_steps: int = 0) -> None:
        """Charge tokens of a step.

        Args:
            num_tokens: the tokens.
            price: device time of one token of the step.
            num_steps: 1 to count the step.
        """
        self.device_seconds += num_tokens * price
        self.num_tokens += num_tokens
        self.num_steps += num_steps

    def enter(self, price_sum: float, num_steps: int) -> None:
        """Charge one token of every step from now on; see `Accounting` for the arguments."""
        self._entered = (price_sum, num_steps)

    def leave(self, price_sum: float, num_steps: int) -> None:
        """Charge the steps since `enter`, if it was called."""
        if self._entered is not None:
            entered_sum, entered_steps = self._entered
            self._entered = None
            num_steps -= entered_steps
            self.charge(num_steps, 0.0, num_steps)
            self.device_seconds += price_sum - entered_sum


class Accounting:
    """Owns the engine's totals, and charges sequences for steps and blocks. Part of the scheduler.

    Every sequence of the batch is charged for at least one token of every step from the one that admitted it on;
    `StepCharges` corrects that for a step in which a sequence has none. A sequence that
    leaves the batch while a step with its tokens is in flight is charged for that step when it ends: a preempted
    sequence in its account, an ended one in the total of its outcome only. The figures that an ended sequence reports
    then include an estimate, at the price of the step before.

    Attributes:
        now: time of the current operation in seconds, on any clock; the engine sets it.
        num_computed_tokens: tokens computed.
        num_computed_prompt_tokens: see `SequenceUsage`, of ended sequences.
        num_recomputed_tokens: see `SequenceUsage`, of ended sequences.
        prefill_steps: times of the steps with more than one token of a sequence.
        decode_steps: times of the other steps.
        num_ended: ended sequences, by `FinishReason` - 1.
        ended_device_seconds: device time charged to them.
        ended_block_seconds: KV blocks times seconds charged to them.
        num_drafts: drafts computed.
        num_draft_tokens: their tokens.
        num_accepted_tokens: by place in the draft, the tokens that were kept.
        num_reserved_tokens: tokens that the sequences of the batch have if all reach their limits.
        least_price: lowest device time of one token of a step so far; 0.0 before the first.
        least_seconds: device time of the shortest step so far; 0.0 before the first.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_computed_tokens = 0
        self.num_computed_prompt_tokens = 0
        self.num_recomputed_tokens = 0
        self.prefill_steps = StepTimes()
        self.decode_steps = StepTimes()
        self.num_ended = [0] * len(FinishReason)
        self.ended_device_seconds = [0.0] * len(FinishReason)
        self.ended_block_seconds = [0.0] * len(FinishReason)
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens: list[int] = []
        self.num_reserved_tokens = 0
        self.least_price = 0.0
        self.least_seconds = 0.0
        self._price = 0.0  # of the newest step
        self._price_sum = 0.0  # over all steps
        self._num_steps = 0
        self._num_blocks = 0  # held, with repetitions
        self._block_seconds = 0.0  # see `SequenceAccount.block_seconds`

    @property
    def device_seconds(self) -> float:
        """Device time of all steps."""
        return self.prefill_steps.seconds + self.decode_steps.seconds

    @property
    def block_seconds(self) -> float:
        """KV blocks times seconds, until `now`, of all sequences, also those in the batch."""
        return self._block_seconds + self._num_blocks * self.now

    def charge_step(self, num_tokens: int, seconds: float, *, prefill: bool) -> float:
        """Charge the sequences of the batch for one token of a step each.

        Args:
            num_tokens: tokens of the step.
            seconds: its device time.
            prefill: whether it has more than one token of a sequence.

        Returns:
            The price of one token.
        """
        (self.prefill_steps if prefill else self.decode_steps).add(seconds)
        self.num_computed_tokens += num_tokens
        self._price = price = seconds / max(1, num_tokens)
        self._price_sum += price
        self._num_steps += 1
        if price < self.least_price or not self.least_price:
            self.least_price = price
        if seconds < self.least_seconds or not self.least_seconds:
            self.least_seconds = seconds
        return price

    def note_draft(
        self, account: SequenceAccount, num_tokens: int, num_accepted: int, num_dropped: int
    ) -> None:
        """Count a draft of a sequence.

        Args:
            account: the sequence's.
            num_tokens: of the draft.
            num_accepted: its leading tokens that the sequence has now.
            num_dropped: see `SequenceAccount`.
        """
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        account.num_draft_tokens += num_tokens
        account.num_accepted_tokens += num_accepted
        account.num_dropped_tokens += num_dropped
        if account.draft_is_predicted:
            account.num_predicted_tokens += num_tokens
            account.num_accepted_predicted_tokens += num_accepted
        counts = self.num_accepted_tokens
        counts += [0] * (num_accepted - len(counts))
        for place in range(num_accepted):
            counts[place] += 1

    def charge_ended(self, reason: FinishReason, num_tokens: int) -> None:
        """Charge tokens of the newest step to a sequence that had ended before the step did."""
        self.ended_device_seconds[reason - 1] += num_tokens * self._price

    def enter(self, account: SequenceAccount) -> None:
        """Note that a sequence had its first token in the batch in the newest step."""
        account.enter(self._price_sum - self._price, self._num_steps - 1)

    def admit(self, account: SequenceAccount, num_blocks: int, num_cached_tokens: int) -> None:
        """Note that a sequence was admitted to the batch.

        Args:
            account: the sequence's.
            num_blocks: blocks that it got.
            num_cached_tokens: its leading tokens with keys and values in them.
        """
        if account.scheduled_at is None:
            account.scheduled_at = self.now
        first = account.num_first_tokens
        if num_cached_tokens > first:
            prompt = account.num_prompt_tokens
            account.num_cached_tokens += num_cached_tokens - first
            account.num_cached_prompt_tokens += min(num_cached_tokens, prompt) - min(first, prompt)
            account.num_first_tokens = num_cached_tokens
        self.allocate(account, num_blocks)

    def allocate(self, account: SequenceAccount, num_blocks: int) -> None:
        """Note that a sequence got blocks."""
        self._num_blocks += num_blocks
        self._block_seconds -= num_blocks * self.now
        account.block_seconds -= num_blocks * self.now

    def leave(self, account: SequenceAccount, num_blocks: int, num_computed_tokens: int) -> None:
        """Note that a sequence leaves the batch.

        Args:
            account: the sequence's.
            num_blocks: blocks that it returns.
            num_computed_tokens: its leading tokens with keys and values in them.
        """
        account.leave(self._price_sum, self._num_steps)
        account.num_first_tokens = max(account.num_first_tokens, num_computed_tokens)
        self._num_blocks -= num_blocks
        self._block_seconds += num_blocks * self.now
        account.block_seconds += num_blocks * self.now

    def end(
        self,
        account: SequenceAccount,
        reason: FinishReason,
        *,
        num_tokens_in_flight: int,
        has_output: bool,
    ) -> SequenceUsage:
        """Add the figures of a sequence that ends to the totals, and return them. Call after `leave`.

        Args:
            account: the sequence's.
            reason: why it ends.
            num_tokens_in_flight: its tokens in steps that have not ended; the step of each samples a token.
            has_output: whether a token was generated.
        """
        self.num_ended[reason - 1] += 1
        self.ended_device_seconds[reason - 1] += account.device_seconds
        self.ended_block_seconds[reason - 1] += account.block_seconds
        account.charge(num_tokens_in_flight, self._price, num_tokens_in_flight)
        first, prompt = account.num_first_tokens, account.num_prompt_tokens
        computed_prompt = min(first, prompt) - account.num_cached_prompt_tokens
        # Tokens of an aborted prefill in flight count as computed but are not charged yet.
        useful = account.num_tokens - account.num_dropped_tokens
        recomputed = max(0, useful - (first - account.num_cached_tokens))
        self.num_computed_prompt_tokens += computed_prompt
        self.num_recomputed_tokens += recomputed
        prefill_seconds = decode_seconds = 0.0
        if account.scheduled_at is not None:
            first_token_at = account.first_token_at
            if first_token_at is None:
                first_token_at = self.now
            prefill_seconds = first_token_at - account.scheduled_at
            decode_seconds = self.now - first_token_at if has_output else 0.0
        return SequenceUsage(
            prefill_seconds,
            decode_seconds,
            account.num_steps,
            account.num_cached_prompt_tokens,
            computed_prompt,
            recomputed,
            account.device_seconds,
            account.block_seconds,
            account.num_draft_tokens,
            account.num_accepted_tokens,
            account.num_predicted_tokens,
            account.num_accepted_predicted_tokens,
        )
