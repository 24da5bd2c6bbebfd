"""Packs scheduled sequences into the arrays of a step. No other module writes token ids, slots and block tables."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from model.executors.columns import Bucket, Want, columns_of, extra_columns
from model.executors.step import StepInput
from server.engine.core.memory.state_slots import NO_SLOT
from server.engine.runner.step.batch_needs import scores_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from numpy.typing import NDArray

    from model.device.transfer import HostArray
    from server.engine.core.sequence import Sequence as EngineSequence
    from server.engine.core.step import DecodeBatch, DecodeRows, ScheduledSequence
    from server.engine.runner.step.sampled_tokens import SampledTokens


def exact_bucket(
    decode: DecodeRows,
    prefill: Sequence[ScheduledSequence],
    block_size: int,
    shared_blocks: int = 0,
    *,
    has_states: bool = False,
    exact_rows: int = 1,
) -> Bucket:
    """Return the bucket that a step fills completely.

    Args:
        decode: the decode rows.
        prefill: the other sequences; `decode` and `prefill` have at least one sequence together.
        block_size: tokens per block.
        shared_blocks: see `Bucket`; ignored by a step with a deterministic sequence.
        has_states: see `Bucket`.
        exact_rows: of `SchedulerConfig`. The tokens of drafts are separate rows in a step of so many.
    """
    deterministic = decode.batch.deterministic or any(s.sequence.deterministic for s in prefill)
    longest = max([s.start + s.num_tokens for s in prefill], default=0)
    queries, rows, chained = 1, len(decode), False
    extra = _extra_columns(decode.batch, prefill)
    exact = not (deterministic or prefill or extra) and decode.num_tokens <= exact_rows
    if decode.drafts is not None:
        counts = [1 + len(draft) for draft in decode.drafts]
        queries = max(counts)
        longest = max(longest, *map(sum, zip(decode.starts, counts, strict=True)))
        if exact and decode.num_logits == decode.num_tokens:
            queries, rows, chained = 1, decode.num_tokens, True
    elif decode.starts:
        longest = max(longest, max(decode.starts) + 1)
    return Bucket(
        rows=rows,
        queries=queries,
        prompt_tokens=sum(s.num_tokens for s in prefill),
        prompt_seqs=len(prefill),
        columns=-(-longest // block_size),
        num_logits=decode.num_logits + sum([s.num_logits for s in prefill]),
        shared_blocks=0 if deterministic or exact else shared_blocks,
        deterministic=deterministic,
        chained=chained,
        has_states=has_states,
        extra_columns=extra,
    )


def is_exact(bucket: Bucket, exact_rows: int) -> bool:
    """Return whether each row of a step of decode rows has the bits of a step of one row."""
    others = bucket.deterministic or bucket.prompt_seqs or bucket.extra_columns
    return not others and bucket.queries == 1 and bucket.rows <= exact_rows


def _extra_columns(batch: DecodeBatch, prefill: Sequence[ScheduledSequence]) -> tuple[str, ...]:
    """Return the extra columns of a step; those of a batch are kept with it."""
    found = batch.extra_columns
    if found is None:
        found = batch.extra_columns = extra_columns(batch.sequences)
    if prefill and (more := extra_columns(s.sequence for s in prefill)):
        return tuple(sorted({*found, *more}))
    return found


def scored_tokens(s: ScheduledSequence) -> list[int]:
    """Return the tokens that follow those of a part of a sequence, as far as the prompt goes.

    The logits at token i score token i + 1; those at the last prompt token are for sampling.
    """
    return s.sequence.token_ids[s.start + 1 : s.start + 1 + s.num_tokens]


def scored_bucket(
    bucket: Bucket, decode: DecodeRows, prefill: Sequence[ScheduledSequence]
) -> Bucket:
    """Return the bucket of a step that also scores the prompts of the sequences that requested it."""
    tops = (s.sequence.sampling.prompt_top_logprobs for s in (*decode, *prefill))
    return msgspec.structs.replace(bucket, want=Want.PROMPT_SCORES, top=max(tops))


def _slots(sequences: Iterable[EngineSequence]) -> HostArray:
    """Return the slots that sequences' states are read from and written to, [.., 2]; a dummy sequence has none."""
    found = [
        (NO_SLOT, NO_SLOT) if it.slots is None else (it.slots.read, it.slots.write)
        for it in sequences
    ]
    return np.array(found, np.int32).reshape(-1, 2)


def _no_batch() -> None:
    """Stand in for a weak reference before the first step."""


_FEW_TOKENS: Final = 32
"""Tokens of a chunk below which lists are faster than arrays."""


class PackedStep:
    """The input arrays of a bucket, reused for each of its steps.

    Attributes:
        input: the arrays.
        reads_sampled: whether the packed step reads tokens that the host does not know yet.
    """

    def __init__(self, bucket: Bucket, block_size: int, device: torch.device) -> None:
        self.input = StepInput(bucket, block_size, device)
        self.reads_sampled = False
        # For each decode row of the block table: the list of blocks it was copied from, and the number of its entries.
        self._held: list[tuple[list[int] | None, int]] = [(None, 0)] * bucket.rows
        # The decode rows of the last step, and the lengths of their block tables then. Weak: there are many inputs, and
        # the sequences of their last steps may have ended.
        self._batch: Callable[[], DecodeBatch | None] = _no_batch
        self._num_blocks: list[int] = []
        self._row_numbers = np.arange(bucket.decode_tokens)
        host = self.input.host
        self._of_sequences = [
            (getattr(host, it.name), it.value, it.fill) for it in columns_of(bucket) if it.value
        ]
        self._logits_rows: tuple[int, list[int]] | None = None
        self._first_sampled = 0
        self._has_kept = False  # whether the last step kept states within prompts

    def pack(
        self,
        decode: DecodeRows,
        prefill: Sequence[ScheduledSequence],
        sampled: SampledTokens,
        first_sampled: int = 0,
    ) -> None:
        """Write a step to the host arrays and queue their copy to the device. The step must fit in the bucket.

        Args:
            decode: the decode rows; the blocks of their tokens are allocated.
            prefill: sequences whose tokens the host knows; their blocks are allocated.
            sampled: holds the tokens that the host does not know yet.
            first_sampled: index in `sampled.ids` of the first token that this step samples.
        """
        self.input.wait()
        if self._of_sequences:
            self._pack_values(decode.batch, prefill)
        if self.input.bucket.has_states:
            self._pack_states(decode.batch, prefill)
            if self.input.bucket.queries > 1:
                self._pack_drafted(decode)
        if self.input.bucket.chained:
            self._pack_chains(decode, sampled)
        elif self.input.bucket.queries > 1:
            self._pack_queries(decode, sampled)
        elif self.input.bucket.rows:
            self._pack_decode(decode, sampled)
        if self.input.bucket.prompt_seqs:
            self._pack_prompts(prefill)
        if self.input.bucket.want is Want.PROMPT_SCORES:
            self._pack_scored(decode, prefill)
        self._pack_logits(decode, prefill, first_sampled, len(sampled.ids) - 1)
        self.input.send()

    def _pack_decode(self, decode: DecodeRows, sampled: SampledTokens) -> None:
        """Write the decode rows of one token each."""
        host, count, rows = self.input.host, len(decode), self.input.bucket.rows
        block_size = self.input.block_size
        self._pack_block_table(decode.batch.sequences, decode.batch)
        ids = sampled.ids_or_rows(decode)
        self.reads_sampled = count > 0 and int(ids.min()) < 0
        positions = host.positions[:count]
        host.token_ids[:count] = ids
        positions[:] = decode.starts
        host.seq_lens[:count] = positions
        host.seq_lens[:count] += 1
        blocks = host.block_table[self._row_numbers[:count], positions // block_size]
        host.slot_mapping[:count] = blocks * block_size + positions % block_size
        if count < rows:
            host.token_ids[count:rows] = 0
            host.positions[count:rows] = 0
            host.seq_lens[count:] = 0
            host.slot_mapping[count:rows] = -1

    def _pack_queries(self, decode: DecodeRows, sampled: SampledTokens) -> None:
        """Write decode rows with drafts: the tokens of a row follow those of the row before."""
        host, count, total = self.input.host, len(decode), decode.num_tokens
        self._pack_block_table(decode.batch.sequences, decode.batch)
        lengths, rows, positions = self._pack_drafts(decode, sampled)
        self._pack_slots(positions, rows)
        host.seq_lens[:count] = np.array(decode.starts, np.int64) + lengths
        host.seq_lens[count:] = 0
        host.cu_seqlens[1 : count + 1] = np.cumsum(lengths)
        host.cu_seqlens[count + 1 :] = total

    def _pack_chains(self, decode: DecodeRows, sampled: SampledTokens) -> None:
        """Write decode rows with drafts, each token as a separate row."""
        host, total = self.input.host, decode.num_tokens
        _, rows, positions = self._pack_drafts(decode, sampled)
        sequences = decode.batch.sequences
        self._pack_block_table([sequences[row] for row in rows], None)
        self._pack_slots(positions, self._row_numbers[:total])
        host.earlier[:total] = positions - np.array(decode.starts, np.int64)[rows]
        host.earlier[total:] = 0
        host.seq_lens[:total] = positions + 1
        host.seq_lens[total:] = 0

    def _pack_drafts(
        self, decode: DecodeRows, sampled: SampledTokens
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Write the ids and the positions of decode rows with drafts.

        Returns:
            (tokens of each decode row, decode row of each token, position of each token).
        """
        host, most, total = self.input.host, self.input.bucket.decode_tokens, decode.num_tokens
        drafts = decode.drafts or [()] * len(decode)
        lengths = np.array([1 + len(draft) for draft in drafts], np.int64)
        firsts = np.cumsum(lengths) - lengths
        rows = np.repeat(np.arange(len(decode)), lengths)
        positions = np.arange(total) + (np.array(decode.starts, np.int64) - firsts)[rows]
        own = sampled.ids_or_rows(decode)
        self.reads_sampled = len(decode) > 0 and int(own.min()) < 0
        assert all(token >= 0 or not draft for token, draft in zip(own, drafts, strict=True))
        ids = np.fromiter(itertools.chain.from_iterable((0, *draft) for draft in drafts), np.int64)
        ids[firsts] = own
        host.token_ids[:total] = ids
        host.token_ids[total:most] = 0
        host.positions[:total] = positions
        host.positions[total:most] = 0
        return lengths, rows, positions

    def _pack_slots(self, positions: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Write the cache slots of tokens, whose blocks are in these rows of the block table."""
        slots, block_size = self.input.host.slot_mapping, self.input.block_size
        blocks = self.input.host.block_table[rows, positions // block_size]
        slots[: len(rows)] = blocks * block_size + positions % block_size
        slots[len(rows) : self.input.bucket.decode_tokens] = -1

    def _pack_values(self, batch: DecodeBatch, prefill: Sequence[ScheduledSequence]) -> None:
        """Write the columns with a value per sequence; those of a batch stay the same."""
        rows = self.input.bucket.rows
        for array, value, fill in self._of_sequences:
            if batch is not self._batch():
                array[: len(batch.sequences)] = [value(it) for it in batch.sequences]
                array[len(batch.sequences) : rows] = fill
            array[rows : rows + len(prefill)] = [value(it.sequence) for it in prefill]
            array[rows + len(prefill) :] = fill

    def _pack_states(self, batch: DecodeBatch, prefill: Sequence[ScheduledSequence]) -> None:
        """Write the slots of the sequences' states; those of a batch stay the same."""
        array, rows = self.input.host.state_slots, self.input.bucket.rows
        if batch is not self._batch():
            array[: len(batch.sequences)] = _slots(batch.sequences)
            array[len(batch.sequences) : rows] = NO_SLOT
        array[rows : rows + len(prefill)] = _slots(it.sequence for it in prefill)
        array[rows + len(prefill) :] = NO_SLOT
        if self.input.bucket.prompt_seqs:
            self._pack_kept(prefill)

    def _pack_drafted(self, decode: DecodeRows) -> None:
        """Write the slots of the states after each token of decode rows with drafts."""
        slots, kept = self.input.host.state_slots, self.input.host.kept_slots
        kept.fill(NO_SLOT)
        slots[: len(decode)] = _slots(decode.batch.sequences)
        first = 0
        for row, (sequence, draft) in enumerate(
            zip(decode.batch.sequences, decode.drafts or (), strict=True)
        ):
            held = sequence.slots
            if draft and held is not None:
                *inner, slots[row, 1] = held.drafts
                kept[first : first + len(draft)] = [held.write, *inner]
            first += 1 + len(draft)

    def _pack_kept(self, prefill: Sequence[ScheduledSequence]) -> None:
        """Write the slots of the states that are kept within prompts."""
        array, first = self.input.host.kept_slots, 0
        if self._has_kept:
            array.fill(NO_SLOT)
        self._has_kept = False
        for row in prefill:
            slots = row.sequence.slots
            for count, kept in () if slots is None else slots.planned.items():
                if 0 < (offset := count - row.start) < row.num_tokens:
                    array[first + offset - 1] = kept.slot
                    self._has_kept = True
            first += row.num_tokens

    def _pack_block_table(
        self, sequences: Sequence[EngineSequence], batch: DecodeBatch | None
    ) -> None:
        """Write the entries of the block table that the rows lack.

        This is correct because a list of blocks only grows, and a sequence gets a new list after its blocks are freed.

        Args:
            sequences: of the rows.
            batch: of these sequences; None if there is none.
        """
        num_blocks = [len(sequence.block_table) for sequence in sequences]
        if batch is not None and batch is self._batch():  # each row has kept its list
            if num_blocks == self._num_blocks:
                return
            pairs = zip(num_blocks, self._num_blocks, strict=True)
            changed = [row for row, (new, old) in enumerate(pairs) if new != old]
        else:
            tables = [sequence.block_table for sequence in sequences]
            self._move_rows(tables)
            changed = [
                row
                for row, (table, (held, known)) in enumerate(zip(tables, self._held, strict=False))
                if table is not held or len(table) != known
            ]
        self._batch = _no_batch if batch is None else weakref.ref(batch)
        self._num_blocks = num_blocks
        block_table, columns = self.input.host.block_table, self.input.bucket.columns
        for row in changed:
            blocks = sequences[row].block_table
            held, known = self._held[row]
            known = known if held is blocks else 0
            # Blocks allocated for later tokens may exceed the columns.
            stop = min(len(blocks), columns)
            if stop == known + 1:
                block_table[row, known] = blocks[known]
            elif known < stop:
                block_table[row, known:stop] = blocks[known:stop]
            self._held[row] = blocks, stop

    def _move_rows(self, tables: list[list[int]]) -> None:
        """Move the rows that the block table has at other places: lists take longer to copy than arrays.

        A sequence that ends moves all rows after its own.

        Args:
            tables: the lists of blocks of the rows.
        """
        before = {id(held): row for row, (held, _) in enumerate(self._held)}
        sources = [before.get(id(table), -1) for table in tables]
        moved = [row for row, source in enumerate(sources) if source not in (row, -1)]
        if not moved:
            return
        held = [self._held[sources[row]] for row in moved]
        used = max(known for _, known in held)
        block_table = self.input.host.block_table
        block_table[moved, :used] = block_table[[sources[row] for row in moved], :used]
        for row, entry in zip(moved, held, strict=True):
            self._held[row] = entry

    def _pack_prompts(self, prefill: Sequence[ScheduledSequence]) -> None:
        """Write the chunks of the prompts."""
        host, block_size = self.input.host, self.input.block_size
        first_token = self.input.bucket.decode_tokens
        ids = host.token_ids[first_token:]
        positions, slots = host.positions[first_token:], host.slot_mapping[first_token:]
        end = 0
        for row, s in enumerate(prefill):
            first, end = end, end + s.num_tokens
            stop = s.start + s.num_tokens
            table = s.sequence.block_table[: -(-stop // block_size)]
            ids[first:end] = s.sequence.token_ids[s.start : stop]
            if (
                s.num_tokens < _FEW_TOKENS
            ):  # such as those that a grammar forces: arrays take longer
                at = range(s.start, stop)
                positions[first:end] = at
                slots[first:end] = [
                    table[i // block_size] * block_size + i % block_size for i in at
                ]
                host.prompt_block_table[row, : len(table)] = table
            else:
                blocks, places = np.array(table, np.int32), np.arange(s.start, stop)
                positions[first:end] = places
                slots[first:end] = blocks[places // block_size] * block_size + places % block_size
                host.prompt_block_table[row, : len(blocks)] = blocks
            host.prompt_seq_lens[row] = stop
            host.prompt_cu_seqlens[row + 1] = end
        ids[end:] = 0
        positions[end:] = 0
        slots[end:] = -1
        host.prompt_seq_lens[len(prefill) :] = 0
        host.prompt_cu_seqlens[len(prefill) + 1 :] = end

    def _pack_scored(self, decode: DecodeRows, prefill: Sequence[ScheduledSequence]) -> None:
        """Write the tokens whose log-probabilities are computed."""
        next_ids = self.input.host.next_ids
        next_ids[:] = -1
        for scheduled, first in ((decode, 0), (prefill, self.input.bucket.decode_tokens)):
            at = first
            for s in scheduled:
                if scores_prompt(s.sequence):
                    ids = scored_tokens(s)
                    next_ids[at : at + len(ids)] = ids
                at += s.num_tokens

    def _pack_logits(
        self,
        decode: DecodeRows,
        prefill: Sequence[ScheduledSequence],
        first_sampled: int,
        unused: int,
    ) -> None:
        """Write which rows get logits, the last ones of each sequence, and the indices of their sampled tokens."""
        host, bucket = self.input.host, self.input.bucket
        ends = itertools.accumulate((s.num_tokens for s in prefill), initial=bucket.decode_tokens)
        next(ends)
        rows: list[int] = []
        for stop, s in zip(ends, prefill, strict=True):
            rows += range(stop - s.num_logits, stop)
        num_decoded = decode.num_logits
        if (num_decoded, rows) == self._logits_rows and first_sampled == self._first_sampled:
            return  # as in nearly every step of decode rows
        count = num_decoded + len(rows)
        self._logits_rows, self._first_sampled = (num_decoded, rows), first_sampled
        host.logits_rows[:num_decoded] = self._row_numbers[:num_decoded]
        host.logits_rows[num_decoded:count] = rows
        host.logits_rows[count:] = 0
        host.sampled_rows[:count] = range(first_sampled, first_sampled + count)
        host.sampled_rows[count:] = unused
