"""Charges the sequences of a batch for each step that ends, and notes when they get their first token."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from server.engine.core.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from server.engine.core.accounting import Accounting
    from server.engine.core.step import SchedulerOutput


class StepCharges:
    """Tracks which sequences enter and leave the batch around the started steps. Part of the scheduler."""

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting
        # Sequences that enter the batch with the step to be started next, and with each started step.
        self._entering: list[Sequence] = []
        self._entered: deque[list[Sequence]] = deque()
        self._idle: deque[list[Sequence]] = deque()  # those without a token in each started step
        self._left: set[Sequence] = set()  # preempted while a step was started
        self._without_token: list[Sequence] = []  # scheduled, no token committed yet

    def admit(self, sequence: Sequence, *, is_first: bool) -> None:
        """Note that a sequence was admitted; `is_first` if it was not before."""
        self._entering.append(sequence)
        if is_first:
            self._without_token.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Note that a sequence was preempted while a step was started."""
        self._left.add(sequence)

    def start(self, idle: list[Sequence]) -> None:
        """Note that the scheduled step was started.

        Args:
            idle: sequences of the batch that have no token in it.
        """
        self._idle.append(idle)
        # A schedule that was not started may have admitted sequences that this one preempted.
        self._entered.append(_running(self._entering))
        self._entering = []

    def charge(self, output: SchedulerOutput, device_seconds: float) -> None:
        """Charge the unfinished sequences for a step that ended."""
        accounting = self._accounting
        price = accounting.charge_step(
            output.num_tokens, device_seconds, prefill=bool(output.prefill)
        )
        for sequence in _running(self._entered.popleft()):
            accounting.enter(sequence.account)
        for sequence in _running(self._idle.popleft()):
            sequence.account.charge(-1, price, -1)
        for row in output.prefill:
            if row.sequence.finish_reason is None:
                row.sequence.account.charge(row.num_tokens - 1, price)
        if output.decode.drafts is not None:
            sequences = output.decode.batch.sequences
            for sequence, draft in zip(sequences, output.decode.drafts, strict=True):
                if sequence.finish_reason is None:
                    sequence.account.charge(len(draft), price)
        if self._left:
            for row in chain(output.decode, output.prefill):
                if row.sequence in self._left and row.sequence.finish_reason is None:
                    row.sequence.account.charge(1, price, 1)
            self._left.clear()

    def note_first_tokens(self) -> None:
        """Note the time of the first token of the sequences that got it in the step that ended."""
        if not self._without_token:
            return
        waiting = []
        for sequence in self._without_token:
            if sequence.num_output_tokens:
                sequence.account.first_token_at = self._accounting.now
            elif sequence.finish_reason is None:
                waiting.append(sequence)
        self._without_token = waiting


def _running(sequences: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if sequence.status is SequenceStatus.RUNNING]
