"""Helpers for tests of the request bookkeeping: short constructors and an arithmetic model."""

from __future__ import annotations

from typing import Any

import msgspec

from model.sampling.parameters import SamplingParams
from server.engine.core.limits import SchedulerConfig
from server.engine.core.memory.block_manager import BlockManager
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.core.schedule.scheduler import Scheduler
from server.engine.core.sequence import Sequence
from server.engine.core.step import NO_ROWS, DecodeRows, SampledRows

VOCAB_SIZE = 11


class Token(msgspec.Struct, frozen=True):
    """A sampler's result."""

    token_id: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


def make_request(
    request_id: int,
    prompt,
    max_new_tokens: int = 4,
    salt=None,
    priority: int = 0,
    client: str = "",
    deadline: float | None = None,
    client_priority: int = 0,
    deterministic: bool = False,
    **sampling: Any,
):
    """Return a request. A prompt given as a number has that many tokens, different from those of other requests."""
    if isinstance(prompt, int):
        prompt = [1000 * (request_id + 1) + i for i in range(prompt)]
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, **sampling),
        cache_salt=salt,
        priority=priority,
        client=client,
        deadline=deadline,
        client_priority=client_priority,
        deterministic=deterministic,
    )


def make_sequence(request_id: int, prompt, max_new_tokens: int = 4, **options: Any):
    return Sequence(make_request(request_id, prompt, max_new_tokens, **options))


def output_of(sequence: Sequence):
    """Return the generated token ids."""
    return sequence.token_ids[sequence.num_prompt_tokens :]


def make_scheduler(
    num_blocks: int,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 1000,
    max_prefill_tokens: int | None = None,
    **blocks: Any,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs, max_num_batched_tokens, max_model_len, max_prefill_tokens
    )
    return Scheduler(config, BlockManager(num_blocks, block_size, **blocks))


def rows_of(output):
    """Return (request id, start, number of tokens, rows of logits) of every row, in order."""
    return [
        (row.sequence.request_id, row.start, row.num_tokens, row.num_logits)
        for row in (*output.decode, *output.prefill)
    ]


def sampled_rows(output, results):
    """Return the results of a step, which are given as a list for each row."""
    count, num_decode = output.decode.num_sampling, len(output.decode)
    assert not any(results[count:num_decode])
    return SampledRows.of(
        [result for row in results[:count] for result in row], results[num_decode:]
    )


def commit(scheduler: Scheduler, output, results, seconds=0.0):
    """Commit the results of a step, which are given as a list for each row; return its events."""
    return list(scheduler.commit(output, sampled_rows(output, results), seconds))


def begin(scheduler: Scheduler):
    """Schedule and start a step."""
    output = scheduler.schedule()
    has_logits = [bool(row.num_logits) for row in output.decode]
    assert has_logits == sorted(has_logits, reverse=True)
    scheduler.start(output)
    return output


def step(scheduler: Scheduler, token_id: int = 7):
    """Schedule, start and commit a step that samples the same token in every row; return its output and events."""
    output = begin(scheduler)
    rows = (*output.decode, *output.prefill)
    events = commit(scheduler, output, [[Token(token_id)] * row.num_logits for row in rows])
    scheduler.check_invariants()
    return output, events


def add(scheduler: Scheduler, request_id: int, prompt, max_new_tokens: int = 4, **sampling: Any):
    """Add a sequence and return it."""
    sequence = make_sequence(request_id, prompt, max_new_tokens, **sampling)
    scheduler.add(sequence)
    scheduler.check_invariants()
    return sequence


def finish_everything(scheduler: Scheduler):
    """Run steps until no sequence is left; return the last event of every request."""
    last = {}
    while scheduler.has_work:
        _, events = step(scheduler)
        last.update(events)
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
    return last


class NumberModel:
    """A model whose keys and values are one number per slot, computed from the number before it.

    Its tokens depend on every number that it reads through the block table, so a slot that was
    lost, overwritten or taken from another prefix changes the text.

    The state of a sequence with slots are its salt and all tokens that were computed for it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.states: dict[int, list[Any]] = {}
        self.last_slots: list[tuple[int, int] | None] = []
        self.last_sampled: dict[Sequence, int] = {}
        self.last_decode = NO_ROWS
        self.last_tables: list[list[int]] = []

    def execute(self, output) -> list[list[Token]]:
        """Compute a step, possibly before the tokens of the previous step are committed."""
        self.check_batch(output.decode)
        rows = (*output.decode, *output.prefill)
        sampled, written = {}, {}
        for row in rows:
            sequence = row.sequence
            drafted = dict(enumerate(row.draft, row.start + 1))
            assert not (drafted and sequence.num_tokens_in_flight)
            state = self.read_state(sequence)
            assert state is None or len(state) == row.start + 1
            for position in range(row.start, row.start + row.num_tokens):
                before = self.read(sequence, position - 1) if position else 0
                if position in drafted:
                    token_id = drafted[position]
                elif position < sequence.num_tokens:
                    token_id = sequence.token_ids[position]
                else:
                    assert position == sequence.num_tokens
                    token_id = self.last_sampled[sequence]
                self.slots[self.slot(sequence, position)] = hash((before, token_id))
                if state is not None:
                    state.append(token_id)
            if state is not None:
                own_and_drafted = [sequence.slots.write, *sequence.slots.drafts]
                assert not sequence.slots.drafts or len(sequence.slots.drafts) == len(row.draft)
                last = own_and_drafted[len(row.draft)]
                written[last] = state
                for i, slot in enumerate(own_and_drafted[: len(row.draft)]):
                    assert slot not in written
                    written[slot] = state[: row.start + 2 + i]
                first = state[0], *state[1 : row.start + 1]
                for count, kept in sequence.slots.planned.items():
                    if row.start < count < row.start + row.num_tokens and row in output.prefill:
                        assert kept.slot not in written
                        written[kept.slot] = [*first, *state[row.start + 1 : count + 1]]
            numbers = [self.read(sequence, p) for p in range(row.start + row.num_tokens)]
            sampled[sequence] = [
                sample_token(numbers[:position], banned_ids(sequence, position))
                for position in row.sampled_positions
            ]
        self.states |= written
        self.last_sampled = {sequence: ids[-1] for sequence, ids in sampled.items() if ids}
        return [[Token(token_id) for token_id in sampled[row.sequence]] for row in rows]

    def check_batch(self, decode) -> None:
        """Check what the same batch in two steps in sequence means."""
        tables = [sequence.block_table for sequence in decode.batch.sequences]
        slots = [it.slots and (it.slots.read, it.slots.write) for it in decode.batch.sequences]
        if decode.batch is self.last_decode.batch:
            assert all(a is b for a, b in zip(tables, self.last_tables, strict=True))
            assert slots == self.last_slots
            rows = [*decode][: min(decode.num_sampling, self.last_decode.num_sampling)]
            assert len({row.start < row.sequence.num_tokens for row in rows}) <= 1
            for row in rows:
                assert row.start == row.sequence.num_known_tokens - 1
        self.last_decode, self.last_tables, self.last_slots = decode, tables, slots

    def poison_empty_blocks(self, manager: BlockManager) -> None:
        for start, stop in manager._empty.stretches:
            size = self.block_size
            self.slots[start * size : stop * size] = [None] * ((stop - start) * size)

    def poison_free_slots(self, manager: BlockManager) -> None:
        for slot in manager.slots._free if manager.slots else ():
            self.states.pop(slot, None)

    def read_state(self, sequence: Sequence) -> list[Any] | None:
        """Return a copy of the state that the next step of a sequence reads; None if it has none."""
        if sequence.slots is None:
            return None
        if sequence.slots.read < 0:
            return [sequence.cache_salt]
        salt, *tokens = self.states[sequence.slots.read]
        assert salt == sequence.cache_salt
        assert tokens[: sequence.num_tokens] == sequence.token_ids[: len(tokens)]
        return [salt, *tokens]

    def slot(self, sequence: Sequence, position: int) -> int:
        block = sequence.block_table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def read(self, sequence: Sequence, position: int) -> int:
        number = self.slots[self.slot(sequence, position)]
        assert number is not None, f"{sequence} reads position {position}, which was never written"
        return number


def banned_ids(sequence: Sequence, position: int | None = None) -> tuple[int, ...]:
    position = sequence.num_known_tokens if position is None else position
    return sequence.sampling.banned_ids(sequence.token_ids, position - sequence.num_prompt_tokens)


def propose(scheduler: Scheduler, output, drafts):
    """Add drafts, by request id, to the rows of a scheduled step that can have one; return the step to start."""
    decode, found = output.decode, []
    for row in decode:
        sequence = row.sequence
        draft = drafts.get(sequence.request_id, ()) if row.num_logits else ()
        num_blocks = len(sequence.block_table)
        stop = row.start + 1 + len(draft)
        held = sequence.slots
        if (
            sequence.num_tokens_in_flight
            or not (held is None or held.may_have_draft)
            or not scheduler.block_manager.grow(sequence, stop)
        ):
            draft = ()
        draft = draft[: scheduler.block_manager.lend_for_draft(sequence, len(draft))]
        scheduler.accounting.allocate(sequence.account, len(sequence.block_table) - num_blocks)
        found.append(tuple(draft))
    if any(found):
        rows = DecodeRows(decode.batch, decode.starts, decode.num_sampling, found)
        num_tokens = output.num_tokens + rows.num_tokens - decode.num_tokens
        output = msgspec.structs.replace(output, decode=rows, num_tokens=num_tokens)
        scheduler._scheduled = output
    return output


def sample_token(numbers: list[int], banned) -> int:
    token_id = hash(tuple(numbers)) % VOCAB_SIZE
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def generate_alone(request: GenerateRequest) -> tuple[list[int], FinishReason]:
    """Return the output of a request that is computed alone, without a scheduler."""
    sampling = request.sampling
    numbers: list[int] = []
    output: list[int] = []
    ends = {*sampling.eos_token_ids, *sampling.stop_token_ids}
    while True:
        for token_id in (request.prompt_token_ids + output)[len(numbers) :]:
            numbers.append(hash((numbers[-1] if numbers else 0, token_id)))
        banned = ends if len(output) < sampling.min_new_tokens else ()
        output.append(sample_token(numbers, banned))
        if output[-1] in sampling.eos_token_ids:
            return output, FinishReason.EOS
        if output[-1] in sampling.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) == sampling.max_new_tokens:
            return output, FinishReason.LENGTH
