"""One request inside the engine: its tokens, how many of them are computed, and its cache blocks.

It knows neither scheduling policy nor where blocks come from.
"""

from __future__ import annotations

import enum

from server.engine.core.request import FinishReason, GenerateRequest


class SequenceStatus(enum.IntEnum):
    """Where a sequence is in its life."""

    WAITING = 1
    """Queued; holds no block."""
    RUNNING = 2
    """Holds the blocks of its whole known context; takes part in every step."""
    FINISHED = 3
    """Ended; holds no block, and `Sequence.finish_reason` says why."""


class Sequence:
    """The tokens of one request and the state of their computation.

    `Scheduler` alone changes it, except `block_table` and the two prefix fields, which belong to
    `BlockManager`. Token ids are only ever appended, so what was computed once stays valid.

    A token in flight is drawn by a step that is being computed: its position is known and its id is
    not. It counts in `num_known_tokens` alone.

    Invariants: `0 <= num_computed_tokens < num_known_tokens` while it is unfinished, and
    `num_computed_tokens <= len(block_table) * block_size`.

    Attributes:
        request_id: unique among the sequences of one scheduler.
        token_ids: prompt and output so far; append-only.
        num_prompt_tokens: tokens; the first so many of `token_ids` are the prompt.
        num_computed_tokens: leading tokens whose keys and values are in the cache, or will be before
            the device computes anything that is scheduled later.
        num_tokens_in_flight: how many steps that draw a token of it have been started and not ended.
        max_num_tokens: prompt plus `max_new_tokens`; the sequence ends when it has so many.
        block_table: ids of the blocks that hold its keys and values, in order of position.
        sampling: how its tokens are chosen.
        cache_salt: sequences share cached blocks only with sequences of an equal salt.
        status: waiting, running or finished.
        finish_reason: None until it is finished.
        error: what went wrong; None where nothing did.
        arrival: number of sequences added before it; gives the order of service.
        num_cached_tokens: tokens taken from the prefix cache when it was first admitted.
        first_scheduled_step: number of the step that first computed a token of it; None before.
        num_preemptions: times it lost its blocks to an older sequence.
        num_linked_blocks: leading blocks whose content the prefix cache knows.
        prefix_link: names the content of those blocks in the prefix cache; the salt at the root.
    """

    __slots__ = (
        "_end_token_ids",
        "arrival",
        "block_table",
        "cache_salt",
        "error",
        "finish_reason",
        "first_scheduled_step",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_linked_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens_in_flight",
        "prefix_link",
        "request_id",
        "sampling",
        "status",
        "token_ids",
    )

    def __init__(self, request: GenerateRequest, cache_salt: str | None = None) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_tokens_in_flight = 0
        self.max_num_tokens = self.num_prompt_tokens + sampling.max_new_tokens
        self.block_table: list[int] = []
        self.sampling = sampling
        self.cache_salt = cache_salt
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.arrival = 0
        self.num_cached_tokens = 0
        self.first_scheduled_step: int | None = None
        self.num_preemptions = 0
        self.num_linked_blocks = 0
        self.prefix_link: int | str | None = cache_salt
        self._end_token_ids = frozenset(sampling.end_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose position is taken: `num_tokens` and the one in flight."""
        return len(self.token_ids) + self.num_tokens_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known_output_tokens(self) -> int:
        """The same with the one in flight."""
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated token ids."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_argmax(self) -> bool:
        """Whether its next token needs no sampler, as in `SamplingParams.argmax_from`."""
        return self.num_known_output_tokens >= self.sampling.argmax_from

    def append(self, token_id: int) -> FinishReason | None:
        """Add a generated token and say whether it ends the sequence.

        Args:
            token_id: the token drawn at position `num_tokens`.

        Returns:
            Why the sequence is complete now, or None if it goes on. The model's own end tokens win
            over the request's stop tokens, and both over the length.
        """
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id in self._end_token_ids:
            num_before = len(token_ids) - 1 - self.num_prompt_tokens
            if num_before >= self.sampling.min_new_tokens:
                is_eos = token_id in self.sampling.eos_token_ids
                return FinishReason.EOS if is_eos else FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) >= self.max_num_tokens else None

    def __repr__(self) -> str:
        return (
            f"Sequence(request_id={self.request_id}, {self.status.name}, "
            f"num_tokens={self.num_tokens}, num_computed_tokens={self.num_computed_tokens}, "
            f"block_table={self.block_table})"
        )
