"""Which tokens of which sequences the next step computes, and what becomes of its results.

It knows neither tensors nor time: a step is a list of (sequence, number of tokens).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from server.engine.block_manager import BlockManager
from server.engine.request import TokenEvent
from server.engine.sequence import Sequence


class AdmissionError(Exception):
    """A sequence that `Scheduler.add` refuses."""


class CapacityError(AdmissionError):
    """A request that could never finish, however long it waited.

    Attributes:
        value: tokens the request may come to (prompt + max_new_tokens).
        limit: tokens that one sequence can have.
    """

    def __init__(self, value: int, limit: int) -> None:
        super().__init__(f"prompt and max_new_tokens come to {value} tokens; at most {limit} fit")
        self.value = value
        self.limit = limit


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one sequence.

    Attributes:
        max_num_seqs: sequences computed in one step, at least 1.
        max_num_batched_tokens: tokens computed in one step, at least `max_num_seqs`.
        max_model_len: tokens of one sequence, prompt and output, at least 2.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class SampledResult(Protocol):
    """What the sampler says about one row."""

    @property
    def token_id(self) -> int | None:
        """The token drawn; without meaning where `error` is set."""

    @property
    def logprob(self) -> float | None:
        """Natural logarithm of its probability, where asked for."""

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """(token id, log-probability), most likely first."""

    @property
    def error(self) -> str | None:
        """Why no token could be drawn; None where one was."""


class ScheduledSequence(msgspec.Struct, frozen=True):
    """One sequence's part of a step: its tokens `start .. start + num_tokens`.

    Attributes:
        sequence: whose tokens.
        start: the first token's position; equals `sequence.num_computed_tokens`.
        num_tokens: at least 1.
        samples: whether this step reaches the end of the known tokens, so that one is drawn.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


class SchedulerOutput(msgspec.Struct, frozen=True):
    """What one step computes. Rows of the batch are `decode` first, then `prefill`.

    Attributes:
        step: number of this step.
        decode: sequences with exactly one token.
        prefill: sequences with two tokens or more.
        num_tokens: tokens in all; 0 when there is nothing to do.
        first_scheduled: sequences that no earlier step computed anything of.
        preempted: ids of the sequences that lost their blocks in this call.
    """

    step: int
    decode: tuple[ScheduledSequence, ...]
    prefill: tuple[ScheduledSequence, ...]
    num_tokens: int
    first_scheduled: tuple[Sequence, ...]
    preempted: tuple[int, ...]


class Scheduler:
    """Owns the waiting queue and the running list; the engine loop alone calls it."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self.config = config
        self.block_manager = block_manager
        self.num_steps = 0
        self.num_preemptions = 0
        self.prefix_cache_query_tokens = 0
        self.prefix_cache_hit_tokens = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        raise NotImplementedError

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would find anything to compute."""
        raise NotImplementedError

    @property
    def max_total_tokens(self) -> int:
        """Tokens that one sequence can have: the smaller of context and cache."""
        raise NotImplementedError

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            CapacityError: prompt and max_new_tokens exceed the context or the cache.
        """
        raise NotImplementedError

    def abort(self, request_id: int, discard_cached: bool = False) -> Sequence | None:
        """End a sequence in any state and free its blocks at once; None where it is unknown."""
        raise NotImplementedError

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step; reserves their blocks."""
        raise NotImplementedError

    def commit(
        self, output: SchedulerOutput, results: list[SampledResult]
    ) -> list[tuple[int, TokenEvent]]:
        """Book a computed step.

        Args:
            output: from the latest `schedule`.
            results: one per scheduled sequence that samples, decode first, then prefill.

        Returns:
            (request id, event) of every sequence that got a token or ended.
        """
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Assert that queue, running list and blocks agree."""
        raise NotImplementedError
