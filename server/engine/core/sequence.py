"""A request inside the engine: its tokens, how many of them are computed, and its cache blocks."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

from server.engine.core.accounting import SequenceAccount
from server.engine.core.grammar import Matcher
from server.engine.core.request import FinishReason, GenerateRequest, SequenceUsage

if TYPE_CHECKING:
    from server.engine.core.memory.state_slots import SequenceSlots

CacheSalt: TypeAlias = str | tuple[str, "CacheSalt"] | None
"""Names a part of the prefix cache: a request's salt, with a mark if its blocks are computed by deterministic steps,
and with the digest of its adapter.
"""


class SequenceStatus(enum.IntEnum):
    """State of a sequence."""

    WAITING = 1
    """In the queue; owns no block."""
    RUNNING = 2
    """Owns blocks for all its known tokens; takes part in every step."""
    FINISHED = 3
    """Ended; owns no block; `Sequence.finish_reason` says why it ended."""


class Sequence:
    """The tokens of one request and the state of their computation.

    Only `Scheduler` changes a sequence, except that `BlockManager` changes `block_table`, `capacity`,
    `slots`, `num_linked_blocks` and `prefix_link`. Token ids are only appended, so computed keys and values stay valid.

    A token in flight is sampled by a step that the device is still computing: its position is known, its id is not.
    Only `num_known_tokens` and the properties derived from it count it.

    Invariants: `0 <= num_computed_tokens < num_known_tokens` while the sequence is unfinished, and
    `num_computed_tokens <= len(block_table) * block_size`.

    Attributes:
        request_id: unique among the sequences of one scheduler.
        token_ids: prompt and output so far; append-only.
        num_prompt_tokens: number of leading `token_ids` that are the prompt.
        num_computed_tokens: leading tokens whose keys and values are in the cache, or will be before
            the device computes a step that is scheduled later.
        num_tokens_in_flight: tokens that started steps sample and that are not committed yet.
        num_void_results: results of started steps that will be ignored, since other tokens took their positions.
        max_num_tokens: prompt plus `max_new_tokens`; the sequence ends at this length.
        expected_output: tokens that it will probably generate; set by `LiveSequences`.
        block_table: ids of the blocks that hold its keys and values, in order of position.
        capacity: number of known tokens up to which it is scheduled without another look: those that its blocks hold,
            and fewer than `max_num_tokens`.
        slots: with its state of fixed size, while it runs; None if the network has no such state.
        check_at: while fewer tokens have known ids, a sampled token is only appended, unless its grammar needs a look
            at it or it is one of `end_token_ids`: it neither ends the sequence otherwise nor fills a block. 0 if every
            token is looked at.
        end_token_ids: ids that may end the sequence.
        sampling: how its tokens are chosen.
        matcher: state of its grammar after the tokens with known ids; None without a grammar.
        cache_salt: only sequences with equal salts share cached blocks. Deterministic sequences share none with others,
            since steps that are not deterministic compute other bits, and each adapter gives other keys and values.
        deterministic: whether the steps that compute it must be deterministic; see `Bucket`.
        max_draft_tokens, prediction: see `GenerateRequest`.
        client: who sent the request; the queue shares the engine among clients.
        deadline: when the sequence ends, complete or not, on the clock of `Accounting.now`; None for never.
        priority: sequences with a lower number are served first, whoever sent them.
        client_priority: orders the sequences of one client and one priority: those with a lower number first.
        is_expired: whether its deadline has passed; it ends with its next token.
        status: waiting, running or finished.
        finish_reason: None until it is finished.
        error: description of the error that ended the sequence; else None.
        arrival: number of sequences that came into the queue before it; set by `WaitingQueue.add`.
        rank: its place in the running list: `priority`, then the number of sequences admitted before it for the first
            time.
        num_cached_tokens: tokens taken from the prefix cache when it was first admitted.
        first_scheduled_step: number of the first step that scheduled it; None before.
        num_preemptions: times it was preempted.
        num_linked_blocks: leading blocks whose content is in the prefix cache.
        prefix_link: link of those blocks' content in the prefix cache; the cache salt if there are none.
        adapter: of the model; None for the model alone.
        adapter_slot: slot of its adapter while it is queued or runs; -1 for none.
        account: what it has used so far.
        usage: what it used; None until it is finished.
    """

    __slots__ = (
        "account", "adapter", "adapter_slot", "arrival", "block_table", "cache_salt", "capacity", "check_at",
        "client", "client_priority", "deadline", "deterministic", "end_token_ids", "error", "expected_output",
        "finish_reason", "first_scheduled_step", "is_expired", "matcher", "max_draft_tokens", "max_num_tokens",
        "num_cached_tokens", "num_computed_tokens", "num_linked_blocks", "num_preemptions", "num_prompt_tokens",
        "num_tokens_in_flight", "num_void_results", "prediction", "prefix_link", "priority", "rank",
        "request_id", "sampling", "slots", "status", "token_ids", "usage",
    )  # fmt: skip

    def __init__(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_tokens_in_flight = 0
        self.num_void_results = 0
        self.max_num_tokens = self.num_prompt_tokens + sampling.max_new_tokens
        self.expected_output = sampling.max_new_tokens
        self.block_table: list[int] = []
        self.capacity = 0
        self.slots: SequenceSlots | None = None
        self.check_at = 0
        self.sampling = sampling
        self.matcher: Matcher | None = None
        self.deterministic = request.deterministic
        self.max_draft_tokens = request.max_draft_tokens
        self.prediction = request.prediction
        self.cache_salt: CacheSalt = request.cache_salt
        self.adapter = request.adapter
        self.adapter_slot = -1
        if request.deterministic:
            self.cache_salt = ("deterministic", self.cache_salt)
        if request.adapter is not None:
            self.cache_salt = (f"adapter {request.adapter.digest}", self.cache_salt)
        self.client = request.client
        self.deadline = request.deadline
        self.priority = request.priority
        self.client_priority = request.client_priority
        self.is_expired = False
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.arrival = 0
        self.rank = (request.priority, 0)
        self.num_cached_tokens = 0
        self.first_scheduled_step: int | None = None
        self.num_preemptions = 0
        self.num_linked_blocks = 0
        self.prefix_link: int | CacheSalt = self.cache_salt
        self.account = SequenceAccount(self.num_prompt_tokens)
        self.usage: SequenceUsage | None = None
        self.end_token_ids = frozenset(sampling.end_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens with known ids."""
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """`num_tokens` plus the tokens in flight."""
        return len(self.token_ids) + self.num_tokens_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Output tokens with known ids."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known_output_tokens(self) -> int:
        """Output tokens, including those in flight."""
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def client_rank(self) -> tuple[int, tuple[int, int]]:
        """Its place among the sequences of its client and priority that were admitted: the last is preempted first."""
        return self.client_priority, self.rank

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the plain argmax of the logits; see `SamplingParams.argmax_from`."""
        known = len(self.token_ids) + self.num_tokens_in_flight - self.num_prompt_tokens
        return known >= self.sampling.argmax_from

    def append(self, token_id: int) -> FinishReason | None:
        """Add a generated token.

        Args:
            token_id: the token sampled for position `num_tokens`.

        Returns:
            Why the sequence is complete now, or None if it continues. The model's own end tokens take
            precedence over the request's stop tokens, both over the end of the grammar, all over the length, and
            that over an expired deadline. ERROR if the grammar does not accept the token; `error` says why.
        """
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id in self.end_token_ids:
            num_before = len(token_ids) - 1 - self.num_prompt_tokens
            if num_before >= self.sampling.min_new_tokens:
                is_eos = token_id in self.sampling.eos_token_ids
                return FinishReason.EOS if is_eos else FinishReason.STOP
        matcher = self.matcher
        if matcher is not None:
            if not matcher.accept(token_id):
                self.error = matcher.error or "the grammar does not allow the sampled token"
                return FinishReason.ERROR
            if matcher.is_complete:
                return FinishReason.EOS
        if len(token_ids) >= self.max_num_tokens:
            return FinishReason.LENGTH
        return FinishReason.TIMEOUT if self.is_expired else None

    def __repr__(self) -> str:
        return (
            f"Sequence(request_id={self.request_id}, {self.status.name}, "
            f"num_tokens={self.num_tokens}, num_computed_tokens={self.num_computed_tokens}, "
            f"block_table={self.block_table})"
        )
