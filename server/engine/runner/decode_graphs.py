"""Decode steps that are recorded once and replayed: one launch for the host instead of hundreds.

A recording is for a number of sequences and a length of block tables; a step takes the smallest there is that it fits
in, its missing sequences have no tokens. All recordings of a length and number share nothing but the model:

    host arrays  ── one copy ──>  device arrays  ── replay ──>  logits, most likely tokens
    ids, positions, slots, lengths, block tables; page-locked, and only what changed is written

A token that the host has not seen yet is looked up in what the step before drew (`drawn_tokens`), and the most
likely tokens are left there for the next step. Of sampling it knows the most likely token.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kernels import PagedBatch
from model.device.transfer import StagedArrays
from server.engine.runner.recordings import Recordings
from server.engine.runner.shared_prefix import shared_tokens
from server.engine.runner.step_graph import Computed, StepModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model.device.replay import Replay
    from model.device.transfer import HostArray
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.step import ScheduledSequence
    from server.engine.runner.sampled_tokens import DrawnTokens
    from server.engine.runner.shared_prefix import SharingPays

_FEWEST_COLUMNS: Final = 64
"""Blocks of the shortest tables: 1024 tokens in blocks of 16."""
_ROW_STEP: Final = 16
_LARGE_ROW_STEP: Final = 32
_LARGE_ROWS: Final = 128
_SOME: Final = 3


class GraphKey(NamedTuple):
    """What a recording is for: at most so many sequences, with block tables of so many columns."""

    num_rows: int
    num_columns: int


class DecodeRows(NamedTuple):
    """The host arrays of a recording's decode rows.

    Attributes:
        input_ids: [R] int64.
        positions: [R] int64.
        slots: [R] int32.
        seq_lens: [R] int32.
        block_table: [R, C] int32.
        held: which list of blocks each row of `block_table` holds, and how many of its entries.
    """

    input_ids: HostArray
    positions: HostArray
    slots: HostArray
    seq_lens: HostArray
    block_table: HostArray
    held: list[tuple[list[int] | None, int]]


class DecodeGraph:
    """A kind of decode step.

    Attributes:
        arrays: input_ids [R] int64, positions [R] int64, slot_mapping [R] int32, seq_lens [R] int32, block_table
            [R, C] int32, cu_seqlens_q [R + 1] int32. All that a recording reads beside the model: it must outlive it.
        rows: the first five of them on the host.
        replay: None until it is recorded.
    """

    def __init__(self, key: GraphKey, model: StepModel, room: Computed) -> None:
        self._key = key
        self._model = model
        self._room = room.first(key.num_rows)
        rows = key.num_rows
        self.arrays = StagedArrays(
            [
                ((rows,), np.int64),
                ((rows,), np.int64),
                ((rows,), np.int32),
                ((rows,), np.int32),
                (tuple(key), np.int32),
                ((rows + 1,), np.int32),
            ],
            model.device,
        )
        self.arrays.host[5][:] = np.arange(rows + 1)
        ids, positions, slots, seq_lens, table, _ = self.arrays.host
        self.rows = DecodeRows(ids, positions, slots, seq_lens, table, held=[(None, 0)] * rows)
        self.replay: Replay | None = None

    def record(self) -> Replay:
        """Record a step in which no sequence has a token: the same kernels run, and write to no block."""
        self.arrays.wait()
        self.arrays.host[2].fill(-1)
        self.arrays.send()
        input_ids, positions, slots, seq_lens, table, cu_seqlens = self.arrays.device
        model, rows = self._model, self._key.num_rows
        batch = PagedBatch(
            cu_seqlens, seq_lens, table,
            num_tokens=rows,
            max_seqlen_q=1,
            max_seqlen_k=self._key.num_columns * model.kv_cache.block_size,
            keys_settled=True,
        )  # fmt: skip

        def compute_one() -> Computed:
            assert model.one_sequence is not None
            model.one_sequence(input_ids, positions, slots, table, *self._room, model.drawn.ids)
            return self._room

        def compute() -> Computed:
            hidden = model.hidden(input_ids, positions, slots, batch, None)
            model.drawn.put(model.choose(hidden, self._room))
            return self._room

        one = rows == 1 and model.one_sequence is not None
        return model.record(compute_one if one else compute)


class DecodeGraphs:
    """The recordings of a model's decode steps. Used by the engine's thread alone.

    Args:
        model: computes the steps.
        limits: of a step.
        sharing_pays: asked whether a step should read once what its sequences share, which no recording does.
    """

    def __init__(
        self, model: StepModel, limits: SchedulerConfig, sharing_pays: SharingPays | None = None
    ) -> None:
        self._model = model
        self._sharing_pays = sharing_pays
        self._block_size = model.kv_cache.block_size
        self._most_columns = -(-limits.max_model_len // self._block_size)
        self._row_counts = row_counts(limits.max_num_seqs)
        room = model.make_room(limits.max_num_seqs)
        shortest = min(_FEWEST_COLUMNS, self._most_columns)
        some = self._row_counts[::_SOME]
        self.recordings: Recordings[GraphKey, DecodeGraph] = Recordings(
            lambda key: DecodeGraph(key, model, room),
            [
                *(GraphKey(rows, shortest) for rows in self._row_counts),
                # For longer tables a few that others fit in until they have their own.
                *(
                    GraphKey(rows, columns)
                    for columns in self._columns(shortest + 1)
                    for rows in sorted({*some, limits.max_num_seqs})
                ),
            ],
        )

    def prepare(self, decode: tuple[ScheduledSequence, ...]) -> DecodeGraph | None:
        """Find the recording of a step and give it the step's numbers.

        Args:
            decode: at least one sequence with one token.

        Returns:
            None where the step has to be launched kernel by kernel.
        """
        graph = self.recordings.find(self._keys(decode))
        if graph is None:
            return None
        graph.arrays.wait()
        fill(graph.rows, decode, self._block_size, self._model.drawn)
        if reads_once(graph.rows, decode, self._block_size, self._sharing_pays):
            return None
        return graph

    def _keys(self, decode: tuple[ScheduledSequence, ...]) -> Iterator[GraphKey]:
        """Yield the keys that a step fits in, the smallest first, more rows before more columns."""
        blocks = max(s.start for s in decode) // self._block_size + 1
        first = bisect.bisect_left(self._row_counts, len(decode))
        for columns in self._columns(blocks):
            for rows in self._row_counts[first:]:
                yield GraphKey(rows, columns)

    def _columns(self, least: int) -> Iterator[int]:
        """Yield the lengths of tables that hold so many blocks."""
        columns = _FEWEST_COLUMNS
        while columns < self._most_columns:
            if columns >= least:
                yield columns
            columns *= 2
        if least <= self._most_columns:
            yield self._most_columns


def row_counts(most: int) -> list[int]:
    """Numbers of sequences that recordings are made for: close together where few are left unused.

    Args:
        most: sequences of a step.

    Returns:
        1, 2, 4, 8, then every 16th up to 128 and every 32nd beyond, ending with `most`.
    """
    small = [1, 2, 4, 8, *range(_ROW_STEP, _LARGE_ROWS + 1, _ROW_STEP)]
    counts = [*small, *range(_LARGE_ROWS + _LARGE_ROW_STEP, most, _LARGE_ROW_STEP)]
    return [*(n for n in counts if n < most), most]


def fill(
    rows: DecodeRows,
    decode: tuple[ScheduledSequence, ...],
    block_size: int,
    drawn: DrawnTokens,
) -> None:
    """Write a step's numbers to the host arrays; rows past its sequences have no token.

    Args:
        rows: written. Of a block table only what is new to its row is: lists of blocks only ever grow, and one that
            was given back is another list afterwards.
        decode: sequences with one token each, as many as there are rows at most.
        block_size: tokens per block.
        drawn: knows the rows of tokens that the host has not seen.
    """
    count = len(decode)
    starts = [s.start for s in decode]
    rows.input_ids[:count] = [drawn.id_or_row(s.sequence, s.start) for s in decode]
    rows.positions[:count] = starts
    rows.seq_lens[:count] = starts
    rows.seq_lens[:count] += 1
    rows.slots[:count] = [
        s.sequence.block_table[s.start // block_size] * block_size + s.start % block_size
        for s in decode
    ]
    rows.input_ids[count:] = 0
    rows.positions[count:] = 0
    rows.seq_lens[count:] = 0
    rows.slots[count:] = -1
    columns = rows.block_table.shape[1]
    for row, s in enumerate(decode):
        blocks = s.sequence.block_table
        held, known = rows.held[row]
        known = known if held is blocks else 0
        # Blocks reserved for later tokens may be more than there are columns.
        stop = min(len(blocks), columns)
        if known < stop:
            rows.block_table[row, known:stop] = blocks[known:stop]
            rows.held[row] = blocks, stop


def reads_once(
    rows: DecodeRows,
    decode: tuple[ScheduledSequence, ...],
    block_size: int,
    sharing_pays: SharingPays | None,
) -> bool:
    """Whether a step should read once what its decode rows share, which no recording does.

    Args:
        rows: hold the step.
        decode: its sequences with one token.
        block_size: tokens per block.
        sharing_pays: says so; None where no kernel can.
    """
    if sharing_pays is None:
        return False
    table = rows.block_table[: len(decode)]
    num_computed = min(s.start for s in decode)
    return shared_tokens(table, num_computed, block_size, sharing_pays) > 0
