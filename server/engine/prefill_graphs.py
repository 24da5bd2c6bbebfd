"""Prompts that are recorded and replayed, as decode steps are (`decode_graphs`): in whole, in chunks, several at once.

A recording is for a number of tokens, of sequences and of block-table columns; a step takes the smallest there is that
it fits in, and that has at most half as many tokens more. Tokens past its own have no slot and belong to no sequence:
every kernel computes them and nothing reads them. Their share is at most a fifth once a step's own recording has been
made. Knows no sampling but the most likely token.
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kernels import PagedBatch
from model.transfer import StagedArrays
from server.engine.batch import prompt_rows
from server.engine.recordings import Recordings
from server.engine.step_graph import Computed, StepModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model.replay import Replay
    from server.engine.scheduler import SchedulerConfig
    from server.engine.step import ScheduledSequence

_FEWEST_TOKENS: Final = 16
_FEWEST_COLUMNS: Final = 64
"""Blocks of the shorter tables: 1024 tokens in blocks of 16. The others are as long as the model's context."""
_MOST_WASTE: Final = 1.5
_CROWD: Final = 8
"""Sequences of a recording between one and as many as a step may have."""


class PrefillKey(NamedTuple):
    """What a recording is for: at most so many tokens and sequences, with block tables of so many columns."""

    num_tokens: int
    num_seqs: int
    num_columns: int


class PrefillGraph:
    """A kind of step that computes prompts.

    Attributes:
        arrays: input_ids [T] int64, positions [T] int64, last_rows [B] int64, places [B] int64 in `DrawnTokens.ids`,
            slot_mapping [T] int32, seq_lens [B] int32, cu_seqlens_q [B + 1] int32, block_table [B, C] int32. All that
            a recording reads beside the model: it must outlive it.
        replay: None until it is recorded.
    """

    def __init__(self, key: PrefillKey, model: StepModel, room: Computed) -> None:
        self._key = key
        self._model = model
        self._room = room.first(key.num_seqs)
        tokens, seqs, columns = key
        self.arrays = StagedArrays(
            [
                ((tokens,), np.int64),
                ((tokens,), np.int64),
                ((seqs,), np.int64),
                ((seqs,), np.int64),
                ((tokens,), np.int32),
                ((seqs,), np.int32),
                ((seqs + 1,), np.int32),
                ((seqs, columns), np.int32),
            ],
            model.device,
        )
        self.replay: Replay | None = None

    def record(self) -> Replay:
        """Record a step in which no sequence has a token: the same kernels run, and write to no block."""
        self.fill((), 0)
        self.arrays.send()
        ids, positions, last_rows, places, slots, seq_lens, cu_seqlens, table = self.arrays.device
        model = self._model
        batch = PagedBatch(
            cu_seqlens, seq_lens, table,
            num_tokens=self._key.num_tokens,
            max_seqlen_q=self._key.num_tokens,
            max_seqlen_k=self._key.num_columns * model.kv_cache.block_size,
        )  # fmt: skip

        def compute() -> Computed:
            hidden = model.hidden(ids, positions, slots, None, batch)
            model.drawn.put_at(places, model.choose(hidden[last_rows], self._room))
            return self._room

        return model.record(compute)

    def fill(self, prefill: tuple[ScheduledSequence, ...], first_place: int) -> None:
        """Write a step's numbers to the host arrays.

        Args:
            prefill: sequences with known tokens, which fit in the key.
            first_place: where the tokens go that they draw; those that decode rows have drawn lie before them.
        """
        self.arrays.wait()
        ids, positions, last_rows, places, slots, seq_lens, cu_seqlens, table = self.arrays.host
        block_size = self._model.kv_cache.block_size
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
        sampling = [row for row, s in enumerate(prefill) if s.samples]
        last_rows.fill(0)
        last_rows[: len(sampling)] = cu_seqlens[1:][sampling] - 1
        places.fill(len(self._model.drawn.ids) - 1)
        places[: len(sampling)] = np.arange(first_place, first_place + len(sampling))


class PrefillGraphs:
    """The recordings of a model's prompts. Used by the engine's thread alone.

    Args:
        model: computes the steps.
        limits: of a step.
    """

    def __init__(self, model: StepModel, limits: SchedulerConfig) -> None:
        self._block_size = model.kv_cache.block_size
        self._most_columns = -(-limits.max_model_len // self._block_size)
        self._fewest_columns = min(_FEWEST_COLUMNS, self._most_columns)
        self._token_counts = token_counts(limits.max_num_batched_tokens)
        self._seq_counts = sorted({1, min(_CROWD, limits.max_num_seqs), limits.max_num_seqs})
        room = model.make_room(limits.max_num_seqs)
        self.recordings: Recordings[PrefillKey, PrefillGraph] = Recordings(
            lambda key: PrefillGraph(key, model, room),
            [
                PrefillKey(tokens, seqs, columns)
                for seqs, columns in itertools.product(
                    self._seq_counts[:2], sorted({self._fewest_columns, self._most_columns})
                )
                for tokens in self._token_counts
                if tokens <= seqs * columns * self._block_size
            ],
        )

    def prepare(
        self, prefill: tuple[ScheduledSequence, ...], first_place: int
    ) -> PrefillGraph | None:
        """Find the recording of a step and give it the step's numbers; arguments as for `PrefillGraph.fill`.

        Returns:
            None where the step has to be launched kernel by kernel.
        """
        graph = self.recordings.find(self._keys(prefill))
        if graph is not None:
            graph.fill(prefill, first_place)
        return graph

    def _keys(self, prefill: tuple[ScheduledSequence, ...]) -> Iterator[PrefillKey]:
        """Yield the keys that a step fits in, the smallest first; more tokens before more columns or sequences."""
        num_tokens = sum(s.num_tokens for s in prefill)
        blocks = -(-max(s.start + s.num_tokens for s in prefill) // self._block_size)
        first = bisect.bisect_left(self._token_counts, num_tokens)
        most = max(self._token_counts[first], int(_MOST_WASTE * num_tokens))
        stop = bisect.bisect_right(self._token_counts, most)
        for seqs in self._seq_counts[bisect.bisect_left(self._seq_counts, len(prefill)) :]:
            for columns in sorted({self._fewest_columns, self._most_columns}):
                if columns >= blocks:
                    for tokens in self._token_counts[first:stop]:
                        yield PrefillKey(tokens, seqs, columns)


def token_counts(most: int) -> list[int]:
    """Numbers of tokens that recordings are made for: four between a power of two and the next.

    Args:
        most: tokens of a step.

    Returns:
        16, 20, 24, 28, 32, 40, ..., ending with `most`.
    """
    doubled = (_FEWEST_TOKENS << i for i in itertools.count())
    powers = itertools.takewhile(lambda power: power < most, doubled)
    counts = [power + quarter * (power // 4) for power in powers for quarter in range(4)]
    return [*(n for n in counts if n < most), most]
