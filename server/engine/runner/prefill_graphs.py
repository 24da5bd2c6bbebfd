"""Prompts that are recorded and replayed, as decode steps are (`decode_graphs`): alone or with decode rows before them.

A recording is for a number of tokens of prompts, of sequences that have them, of block-table columns and of decode
rows; a step takes the smallest there is that it fits in. Prompts come in whole, in chunks, several at once:

    prompts alone       tokens past a step's own are at most a fifth once its own recording has been made
    with decode rows    one pass over the weights for both; kinds are coarse, so that they are few

Tokens past a step's own have no slot and belong to no sequence: every kernel computes them and nothing reads them.
Knows no sampling but the most likely token.
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kernels import PagedBatch
from model.device.transfer import StagedArrays
from server.engine.runner import decode_graphs
from server.engine.runner.recordings import Recordings
from server.engine.runner.step_graph import Computed, StepModel
from server.engine.runner.step_input import prompt_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model.device.replay import Replay
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.step import ScheduledSequence
    from server.engine.runner.shared_prefix import SharingPays

_FEWEST_TOKENS: Final = 16
_FEWEST_MIXED_TOKENS: Final = 128
_MIXED_PARTS: Final = 2
_FEWEST_COLUMNS: Final = 64
"""Blocks of the shorter tables: 1024 tokens in blocks of 16. The others are as long as the model's context."""
_MOST_WASTE: Final = 1.5
_CROWD: Final = 8
"""Sequences of a recording between one and as many as a step may have."""
_MIXED_CROWD: Final = 32
"""Prompts of a recording with decode rows: the head computes a row for each."""
_MIXED_ROWS: Final = (16, 64)
"""Decode rows of such recordings beside as many as a step may have."""


class PrefillKey(NamedTuple):
    """What a recording is for, at most: prompts' tokens and sequences, columns of block tables, decode rows beside."""

    num_tokens: int
    num_seqs: int
    num_columns: int
    num_rows: int = 0


class PrefillGraph:
    """A kind of step that computes prompts.

    Attributes:
        arrays: input_ids [R + T] int64, positions [R + T] int64, slot_mapping [R + T] int32, last_rows [M] int64,
            places [M] int64 in `DrawnTokens.ids`; of the decode rows cu_seqlens_q [R + 1] int32, seq_lens [R] int32
            and block_table [R, C] int32, and the same three of the prompts, with B for R. All that a recording reads
            beside the model: it must outlive it.
        rows: those of the decode rows on the host.
        replay: None until it is recorded.
    """

    def __init__(self, key: PrefillKey, model: StepModel, room: Computed) -> None:
        self._key = key
        self._model = model
        tokens, seqs, columns, rows = key
        # A step has at most as many sequences of both kinds as there is room for.
        samples = min(rows + seqs, len(room.tokens))
        self._room = room.first(samples)
        self.arrays = StagedArrays(
            [
                ((rows + tokens,), np.int64),
                ((rows + tokens,), np.int64),
                ((rows + tokens,), np.int32),
                ((samples,), np.int64),
                ((samples,), np.int64),
                ((rows + 1,), np.int32),
                ((rows,), np.int32),
                ((rows, columns), np.int32),
                ((seqs + 1,), np.int32),
                ((seqs,), np.int32),
                ((seqs, columns), np.int32),
            ],
            model.device,
        )
        ids, positions, slots, _, _, cu_seqlens, seq_lens, table, *_ = self.arrays.host
        cu_seqlens[:] = np.arange(rows + 1)
        self.rows = decode_graphs.DecodeRows(
            ids[:rows], positions[:rows], slots[:rows], seq_lens, table, held=[(None, 0)] * rows
        )
        self.replay: Replay | None = None

    def record(self) -> Replay:
        """Record a step in which no sequence has a token: the same kernels run, and write to no block."""
        self.fill((), (), 0)
        self.arrays.send()
        ids, positions, slots, last_rows, places, *batches = self.arrays.device
        model, key = self._model, self._key
        most_keys = key.num_columns * model.kv_cache.block_size
        row_starts, row_lens, row_table, starts, lens, table = batches
        decode = None
        if key.num_rows:
            decode = PagedBatch(
                row_starts, row_lens, row_table,
                num_tokens=key.num_rows,
                max_seqlen_q=1,
                max_seqlen_k=most_keys,
                keys_settled=True,
            )  # fmt: skip
        prefill = PagedBatch(
            starts, lens, table,
            num_tokens=key.num_tokens,
            max_seqlen_q=key.num_tokens,
            max_seqlen_k=most_keys,
        )  # fmt: skip

        def compute() -> Computed:
            hidden = model.hidden(ids, positions, slots, decode, prefill)
            model.drawn.put_at(places, model.choose(hidden[last_rows], self._room))
            return self._room

        return model.record(compute)

    def fill(
        self,
        decode: tuple[ScheduledSequence, ...],
        prefill: tuple[ScheduledSequence, ...],
        first_place: int,
    ) -> None:
        """Write a step's numbers to the host arrays.

        Args:
            decode: sequences with one token each, which fit in the key.
            prefill: sequences with known tokens, which fit in the key.
            first_place: where the tokens go that they draw, decode rows first; those that decode rows of another
                recording have drawn lie before them.
        """
        self.arrays.wait()
        block_size = self._model.kv_cache.block_size
        if self._key.num_rows:
            decode_graphs.fill(self.rows, decode, block_size, self._model.drawn)
        num_rows = self._key.num_rows
        ids, positions, slots = (array[num_rows:] for array in self.arrays.host[:3])
        last_rows, places, *_, cu_seqlens, seq_lens, table = self.arrays.host[3:]
        end = 0
        for row, s in enumerate(prefill):
            start, end = end, end + s.num_tokens
            ids[start:end], positions[start:end], slots[start:end] = prompt_rows(s, block_size)
            length = s.start + s.num_tokens
            seq_lens[row] = length
            blocks = s.sequence.block_table[: -(-length // block_size)]
            table[row, : len(blocks)] = blocks
            cu_seqlens[row + 1] = end
        ids[end:] = 0
        positions[end:] = 0
        slots[end:] = -1
        seq_lens[len(prefill) :] = 0
        cu_seqlens[len(prefill) + 1 :] = end
        sampling = [row for row, s in enumerate(decode) if s.samples]
        ends = cu_seqlens[1:].tolist()
        sampling += [num_rows + ends[row] - 1 for row, s in enumerate(prefill) if s.samples]
        last_rows.fill(0)
        last_rows[: len(sampling)] = sampling
        places.fill(len(self._model.drawn.ids) - 1)
        places[: len(sampling)] = np.arange(first_place, first_place + len(sampling))


class PrefillGraphs:
    """The recordings of a model's steps with prompts. Used by the engine's thread alone.

    Args:
        model: computes the steps.
        limits: of a step.
        sharing_pays: asked whether a step should read once what its decode rows share, which no recording does.
    """

    def __init__(
        self, model: StepModel, limits: SchedulerConfig, sharing_pays: SharingPays | None = None
    ) -> None:
        self._block_size = model.kv_cache.block_size
        self._sharing_pays = sharing_pays
        most = limits.max_num_seqs
        most_columns = -(-limits.max_model_len // self._block_size)
        self._column_counts = sorted({min(_FEWEST_COLUMNS, most_columns), most_columns})
        self._token_counts = token_counts(limits.max_num_batched_tokens)
        self._seq_counts = sorted({1, min(_CROWD, most), most})
        self._mixed_token_counts = token_counts(
            limits.max_num_batched_tokens, _FEWEST_MIXED_TOKENS, _MIXED_PARTS
        )
        self._mixed_row_counts = [*(rows for rows in _MIXED_ROWS if rows < most), most]
        self._mixed_seqs = min(_MIXED_CROWD, most)
        room = model.make_room(most)
        self.recordings: Recordings[PrefillKey, PrefillGraph] = Recordings(
            lambda key: PrefillGraph(key, model, room),
            # Prompts first: without a recording they take longer than mixed steps do as two.
            itertools.chain.from_iterable(
                itertools.chain(self._ahead(columns), self._mixed_ahead(columns, most))
                for columns in self._column_counts
            ),
        )

    def prepare(
        self, prefill: tuple[ScheduledSequence, ...], first_place: int
    ) -> PrefillGraph | None:
        """Find the recording of prompts and give it their numbers.

        Args:
            prefill: at least one sequence with known tokens.
            first_place: where the tokens go that they draw; those that decode rows have drawn lie before them.

        Returns:
            None where the step has to be launched kernel by kernel.
        """
        graph = self.recordings.find(self._keys(prefill))
        if graph is not None:
            graph.fill((), prefill, first_place)
        return graph

    def prepare_mixed(
        self, decode: tuple[ScheduledSequence, ...], prefill: tuple[ScheduledSequence, ...]
    ) -> PrefillGraph | None:
        """Find the recording of a step with decode rows and prompts and give it the step's numbers.

        Args:
            decode: at least one sequence with one token.
            prefill: at least one with known tokens.

        Returns:
            None where decode rows and prompts have to be computed apart. No step waits for such a recording to be
            made: two recordings are nearly as quick.
        """
        if len(prefill) > self._mixed_seqs:
            return None
        graph = self.recordings.find(self._mixed_keys(decode, prefill), waits=False)
        if graph is None:
            return None
        graph.fill(decode, prefill, 0)
        if decode_graphs.reads_once(graph.rows, decode, self._block_size, self._sharing_pays):
            return None
        return graph

    def _ahead(self, columns: int) -> Iterator[PrefillKey]:
        """Yield the kinds of prompts alone to record before any is met."""
        for seqs in self._seq_counts[:2]:
            for tokens in self._token_counts:
                if tokens <= seqs * columns * self._block_size:
                    yield PrefillKey(tokens, seqs, columns)

    def _mixed_ahead(self, columns: int, most_seqs: int) -> Iterator[PrefillKey]:
        """Yield the kinds with decode rows."""
        if most_seqs == 1:
            return
        for tokens in self._mixed_token_counts:
            # The most rows first: the others find room in the memory that these took.
            for rows in reversed(self._mixed_row_counts):
                yield PrefillKey(tokens, self._mixed_seqs, columns, rows)

    def _keys(self, prefill: tuple[ScheduledSequence, ...]) -> Iterator[PrefillKey]:
        """Yield the keys that prompts fit in, the smallest first; more tokens before more columns or sequences."""
        num_tokens = sum(s.num_tokens for s in prefill)
        blocks = self._num_blocks(prefill)
        first = bisect.bisect_left(self._token_counts, num_tokens)
        most = max(self._token_counts[first], int(_MOST_WASTE * num_tokens))
        stop = bisect.bisect_right(self._token_counts, most)
        for seqs in self._seq_counts[bisect.bisect_left(self._seq_counts, len(prefill)) :]:
            for columns in self._column_counts[bisect.bisect_left(self._column_counts, blocks) :]:
                for tokens in self._token_counts[first:stop]:
                    yield PrefillKey(tokens, seqs, columns)

    def _mixed_keys(
        self, decode: tuple[ScheduledSequence, ...], prefill: tuple[ScheduledSequence, ...]
    ) -> Iterator[PrefillKey]:
        """Yield the keys that a step of both fits in, the smallest first; more columns before more rows."""
        counts = self._mixed_token_counts
        tokens = counts[bisect.bisect_left(counts, sum(s.num_tokens for s in prefill))]
        blocks = self._num_blocks((*decode, *prefill))
        for rows in self._mixed_row_counts[
            bisect.bisect_left(self._mixed_row_counts, len(decode)) :
        ]:
            for columns in self._column_counts[bisect.bisect_left(self._column_counts, blocks) :]:
                yield PrefillKey(tokens, self._mixed_seqs, columns, rows)

    def _num_blocks(self, scheduled: tuple[ScheduledSequence, ...]) -> int:
        """Return how many columns the longest sequence needs."""
        return -(-max(s.start + s.num_tokens for s in scheduled) // self._block_size)


def token_counts(most: int, fewest: int = _FEWEST_TOKENS, parts: int = 4) -> list[int]:
    """Numbers of tokens that recordings are made for: so many between a power of two and the next.

    Args:
        most: tokens of a step.
        fewest: where they begin, a power of two.
        parts: between two powers.

    Returns:
        16, 20, 24, 28, 32, 40, ..., ending with `most`.
    """
    doubled = (fewest << i for i in itertools.count())
    powers = itertools.takewhile(lambda power: power < most, doubled)
    counts = [power + part * (power // parts) for power in powers for part in range(parts)]
    return [*(n for n in counts if n < most), most]
