"""Decode steps that are recorded once and replayed: one launch for the host instead of hundreds.

A recording is for a number of sequences and a length of block tables; a step takes the smallest that it fits in, its
missing sequences have no tokens. All recordings of a length and number share nothing but the model:

    host arrays  ── one copy ──>  device arrays  ── replay ──>  logits, most likely tokens
    ids, positions, slots, lengths, block tables; page-locked, and only what changed is written

A token that the host has not seen yet is looked up in what the step before drew (`drawn_tokens`), and the most
likely tokens are left there for the next step.

A recording is made when there is nothing else to do, small ones first, or after a step of its kind has been computed
so often without it that it pays. Until then, and for what no recording takes, the step is launched kernel by kernel.
Of sampling it knows the most likely token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from kernels import PagedBatch
from model.transfer import StagedArrays
from server.engine.shared_prefix import shared_tokens

if TYPE_CHECKING:
    from model.decoder import DecoderLM
    from model.kv_cache import KVCache
    from model.replay import Recorder, Replay
    from server.engine.drawn_tokens import DrawnTokens
    from server.engine.scheduler import SchedulerConfig
    from server.engine.shared_prefix import SharingPays
    from server.engine.step import ScheduledSequence, SchedulerOutput

log = logging.getLogger("tessera.engine")

_FEWEST_COLUMNS: Final = 64
"""Blocks of the shortest tables: 1024 tokens in blocks of 16."""
_ROW_STEP: Final = 16
_LARGE_ROW_STEP: Final = 32
_LARGE_ROWS: Final = 128
_PATIENCE: Final = 32
"""Steps of a kind that are launched kernel by kernel before its recording may make a step wait."""


class Computed(NamedTuple):
    """What a recording leaves.

    Attributes:
        logits: [B, V].
        tokens: [B] int64, the most likely of each row, the smallest id among equals; -1 where the largest logit is
            not a finite number.
    """

    logits: torch.Tensor
    tokens: torch.Tensor


class GraphKey(NamedTuple):
    """What a recording is for: at most so many sequences, with block tables of so many columns."""

    num_rows: int
    num_columns: int


@dataclass(slots=True)
class _Kind:
    """One key's arrays and, once made, its recording.

    Attributes:
        arrays: input_ids [R] int64, positions [R] int64, slot_mapping [R] int32, seq_lens [R] int32, block_table
            [R, C] int32, cu_seqlens_q [R + 1] int32. All that a recording reads beside the model: it must outlive it.
        tables: the block table that each row of `block_table` holds, and how many of its entries.
        replay: None until it is recorded.
        num_steps: computed without it.
    """

    arrays: StagedArrays
    tables: list[tuple[list[int] | None, int]]
    replay: Replay | None = None
    num_steps: int = 0


@dataclass(slots=True)
class DecodeGraphs:
    """The recordings of a model's decode steps. Used by the engine's thread alone.

    Attributes:
        model: computes the steps.
        kv_cache: its cache, which must stay where it is.
        recorder: makes recordings.
        limits: of a step.
        drawn: with room for a step's rows.
        sharing_pays: asked whether a step should read once what its sequences share, which no recording does.
    """

    model: DecoderLM
    kv_cache: KVCache
    recorder: Recorder
    limits: SchedulerConfig
    drawn: DrawnTokens
    sharing_pays: SharingPays | None = None
    _kinds: dict[GraphKey, _Kind] = field(default_factory=dict, init=False)
    _waiting: list[GraphKey] = field(default_factory=list, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        rows = row_counts(self.limits.max_num_seqs)
        shortest = min(_FEWEST_COLUMNS, self._most_columns)
        self._waiting = [GraphKey(num_rows, shortest) for num_rows in rows]

    def compute(self, output: SchedulerOutput) -> Computed | None:
        """Compute a step by a recording.

        Args:
            output: what to compute.

        Returns:
            What it leaves, valid until the next step; None where the step has to be launched kernel by kernel.
        """
        if not output.decode or output.prefill:
            return None
        if not all(s.samples and not _wants_hidden(s) for s in output.decode):
            return None
        key = self._key(output.decode)
        kind = self._kinds.get(key)
        if kind is None or kind.replay is None:
            self._miss(key, kind)
            return None
        kind.arrays.wait()
        fill(kind.arrays, kind.tables, output.decode, self.kv_cache.block_size, self.drawn)
        if self.sharing_pays is not None and self._shares(output.decode, kind):
            return None
        kind.arrays.send()
        kind.replay.run()
        logits, tokens = kind.replay.result
        return Computed(logits[: len(output.decode)], tokens[: len(output.decode)])

    def record_next(self) -> bool:
        """Make the next recording that is waited for; return whether there was one."""
        if not self._waiting:
            return False
        key = self._waiting.pop(0)
        kind = self._kinds.setdefault(key, self._new_kind(key))
        if kind.replay is None:
            self._record(key, kind)
        return True

    def _miss(self, key: GraphKey, kind: _Kind | None) -> None:
        """Count a step that had no recording; one that is missed often is made at once."""
        if self._closed:
            return
        if kind is None:
            kind = self._kinds[key] = self._new_kind(key)
        kind.num_steps += 1
        if key not in self._waiting:
            self._waiting.insert(0, key)
        if kind.num_steps >= _PATIENCE:
            self._waiting.remove(key)
            self._record(key, kind)

    def _record(self, key: GraphKey, kind: _Kind) -> None:
        try:
            kind.replay = self._recorded(key, kind.arrays)
        except RuntimeError as error:
            # What cannot be recorded can be launched: the service goes on as it is.
            self._waiting.clear()
            self._closed = True
            log.warning("no more decode steps are recorded: %s failed: %s", key, error)
        else:
            log.debug("recorded decode steps of %s", key)

    @torch.inference_mode()
    def _recorded(self, key: GraphKey, arrays: StagedArrays) -> Replay:
        """Record a step in which no sequence has a token: the same kernels run, and write to no block."""
        arrays.wait()
        arrays.host[2].fill(-1)
        arrays.send()
        input_ids, positions, slots, seq_lens, table, cu_seqlens = arrays.device
        batch = PagedBatch(
            cu_seqlens, seq_lens, table,
            num_tokens=key.num_rows,
            max_seqlen_q=1,
            max_seqlen_k=key.num_columns * self.kv_cache.block_size,
        )  # fmt: skip

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            metadata = self.model.attention_metadata(
                slots, self.kv_cache.block_size, batch, None, self.kv_cache.kv_dtype
            )
            ids = self.drawn.look_up(input_ids)
            hidden = self.model(ids, positions, self.kv_cache, metadata)
            logits = self.model.logits(hidden)
            largest, tokens = logits.max(-1)
            self.drawn.put(tokens)
            # Not a number minus itself, and infinity minus itself, are not 0.
            return logits, torch.where(largest - largest == 0, tokens, -1)

        # The step that is about to be computed may continue from what the last one drew.
        kept = self.drawn.ids.clone()
        replay = self.recorder.record(compute)
        self.drawn.ids.copy_(kept)
        return replay

    def _new_kind(self, key: GraphKey) -> _Kind:
        rows = key.num_rows
        arrays = StagedArrays(
            [
                ((rows,), np.int64),
                ((rows,), np.int64),
                ((rows,), np.int32),
                ((rows,), np.int32),
                (tuple(key), np.int32),
                ((rows + 1,), np.int32),
            ],
            self.kv_cache.layer(0).device,
        )
        arrays.host[5][:] = np.arange(rows + 1)
        return _Kind(arrays, [(None, 0)] * rows)

    def _key(self, decode: tuple[ScheduledSequence, ...]) -> GraphKey:
        """Return the smallest key that a step fits in."""
        blocks = max(s.start for s in decode) // self.kv_cache.block_size + 1
        columns = _FEWEST_COLUMNS
        while columns < blocks:
            columns *= 2
        rows = next(n for n in row_counts(self.limits.max_num_seqs) if n >= len(decode))
        return GraphKey(rows, min(columns, self._most_columns))

    @property
    def _most_columns(self) -> int:
        return -(-self.limits.max_model_len // self.kv_cache.block_size)

    def _shares(self, decode: tuple[ScheduledSequence, ...], kind: _Kind) -> bool:
        assert self.sharing_pays is not None
        table = kind.arrays.host[4][: len(decode)]
        num_computed = min(s.start for s in decode)
        return shared_tokens(table, num_computed, self.kv_cache.block_size, self.sharing_pays) > 0


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
    arrays: StagedArrays,
    tables: list[tuple[list[int] | None, int]],
    decode: tuple[ScheduledSequence, ...],
    block_size: int,
    drawn: DrawnTokens,
) -> None:
    """Write a step's numbers to the host arrays; rows past its sequences have no token.

    Args:
        arrays: as in `_Kind`.
        tables: which list of blocks each row holds already; lists only ever grow, and one that was given back is
            another list afterwards.
        decode: sequences with one token each, as many as there are rows at most.
        block_size: tokens per block.
        drawn: knows the rows of tokens that the host has not seen.
    """
    input_ids, positions, slots, seq_lens, block_table, _ = arrays.host
    count = len(decode)
    starts = [s.start for s in decode]
    input_ids[:count] = [drawn.id_or_row(s.sequence, s.start) for s in decode]
    positions[:count] = starts
    seq_lens[:count] = starts
    seq_lens[:count] += 1
    slots[:count] = [
        s.sequence.block_table[s.start // block_size] * block_size + s.start % block_size
        for s in decode
    ]
    input_ids[count:] = 0
    positions[count:] = 0
    seq_lens[count:] = 0
    slots[count:] = -1
    columns = block_table.shape[1]
    for row, s in enumerate(decode):
        blocks = s.sequence.block_table
        held, known = tables[row]
        known = known if held is blocks else 0
        # Blocks reserved for later tokens may be more than there are columns.
        stop = min(len(blocks), columns)
        if known < stop:
            block_table[row, known:stop] = blocks[known:stop]
            tables[row] = blocks, stop


def _wants_hidden(scheduled: ScheduledSequence) -> bool:
    """Whether a step has to score a prompt's tokens, which needs more than the last row's logits."""
    sequence = scheduled.sequence
    return sequence.sampling.prompt_logprobs and not sequence.num_known_output_tokens
