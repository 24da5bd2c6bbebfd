"""The grid of buckets that steps are recorded for: their sizes, their order, and the buckets that a step fits in.

decode rows only     close together, so that few rows are unused; for rows with drafts only those that steps needed
prompts only         at most a fifth of the tokens is unused
decode and prompts   read the weights once for both; far apart, so that there are few buckets
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, Final

import msgspec

from model.executors.columns import Bucket, input_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server.engine.core.limits import SchedulerConfig

_FEWEST_COLUMNS: Final = 64
"""Columns of the smallest block tables: 1024 tokens in blocks of 16."""
_ROW_STEP: Final = 16
_LARGE_ROW_STEP: Final = 32
_LARGE_ROWS: Final = 128
_SOME: Final = 3
_FEWEST_TOKENS: Final = 16
_FEWEST_MIXED_TOKENS: Final = 128
_MIXED_PARTS: Final = 2
_MOST_WASTE: Final = 1.5
_CROWD: Final = 8
"""Prompts of the middle size of prompt buckets; the others have 1 and `max_num_seqs`."""
_MIXED_CROWD: Final = 32
"""Prompts of most buckets with decode rows. Few, because the LM head computes a row for each."""
_MOST_FORCED: Final = 512
"""Prompt tokens of the largest bucket with decode rows and as many prompts as a step may have: in steps of many
sequences with a grammar, those with forced tokens are short prompts.
"""
_MIXED_ROWS: Final = (16, 64)
"""Decode rows of such buckets, in addition to `max_num_seqs`."""
_FEWEST_SHARED: Final = 16
"""From this number of shared blocks on, not every multiple of `_SHARED_STEP` has buckets."""
_SHARED_STEP: Final = 4


class BucketGrid:
    """The buckets for the limits of a service.

    Args:
        limits: of a step.
        block_size: tokens per block.
        deterministic: whether the steps to record ahead are deterministic.
        has_states: see `Bucket`.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        block_size: int,
        *,
        deterministic: bool = False,
        has_states: bool = False,
    ) -> None:
        self._deterministic, self._has_states = deterministic, has_states
        self._most_seqs = most = limits.max_num_seqs
        self._most_queries, self._most_logits = limits.max_queries, limits.max_logits
        self._block_size = block_size
        self._most_columns = -(-limits.max_model_len // block_size)
        self._rows, self._exact_rows = row_counts(most, limits.exact_rows), limits.exact_rows
        columns = {min(_FEWEST_COLUMNS, self._most_columns), self._most_columns}
        self._prompt_columns = sorted(columns)
        self._tokens = token_counts(limits.prefill_budget)
        self._seqs = sorted({1, min(_CROWD, most), most})
        self._mixed_tokens = token_counts(
            limits.max_num_batched_tokens, _FEWEST_MIXED_TOKENS, _MIXED_PARTS
        )
        self._mixed_rows = [*(rows for rows in _MIXED_ROWS if rows < most), most]
        self._mixed_seqs = sorted({min(_MIXED_CROWD, most), most})

    def ahead(self) -> Iterator[Bucket]:
        """Yield the buckets to record in idle time, in the order in which steps are likely to need them.

        If not all requests are deterministic, deterministic steps get a recording when they first need it.
        """
        if not self._deterministic:
            return self._ahead()
        return (msgspec.structs.replace(it, deterministic=True) for it in self._ahead())

    def _ahead(self) -> Iterator[Bucket]:
        shortest = self._prompt_columns[0]
        for rows in self._rows:
            yield self._bucket(rows, columns=shortest)
        # For longer tables, only a few numbers of rows; other steps use these until their own bucket is recorded.
        some = sorted({*self._rows[::_SOME], self._rows[-1]})
        for columns in self._columns(shortest + 1):
            for rows in some:
                yield self._bucket(rows, columns=columns)
        # Prompts first: a mixed step can use two recordings, but prompts without any take longer than that.
        for columns in self._prompt_columns:
            for seqs in self._seqs[:2]:
                for tokens in self._tokens:
                    if tokens <= seqs * columns * self._block_size:
                        yield self._bucket(0, tokens, seqs, columns)
            if self._most_seqs > 1:
                yield from self._mixed_ahead(columns)

    def _mixed_ahead(self, columns: int) -> Iterator[Bucket]:
        """Yield the buckets of both kinds to record in idle time."""
        for seqs in self._mixed_seqs:
            for tokens in self._mixed_tokens:
                if seqs > _MIXED_CROWD and tokens > _MOST_FORCED:
                    continue
                # The most rows first: later recordings reuse the memory of larger ones.
                for rows in reversed(self._mixed_rows):
                    yield self._bucket(rows, tokens, seqs, columns)

    def fitting(self, step: Bucket) -> Iterator[Bucket]:
        """Yield the buckets that a step fits in, the best first.

        Args:
            step: exact bucket of the step. It also fits in buckets with fewer or no shared blocks.
        """
        # Lazy, because this runs for every step and the first bucket is nearly always recorded.
        if shared := shared_count(step.shared_blocks):
            for kind in self._kinds(step):
                yield msgspec.structs.replace(kind, shared_blocks=shared)
        yield from self._kinds(step)

    def _kinds(self, step: Bucket) -> Iterator[Bucket]:
        """Return the buckets without shared blocks that a step fits in, the best first."""
        if not step.prompt_seqs:
            kinds = self._decode(step)
        elif not step.rows:
            kinds = self._prompts(step)
        else:
            kinds = self._mixed(step)
        fitting = (kind for kind in kinds if kind.num_logits >= step.num_logits)
        if not (step.deterministic or step.chained or step.extra_columns):
            return fitting
        marks = {
            "deterministic": step.deterministic,
            "chained": step.chained,
            "extra_columns": step.extra_columns,
        }
        return (msgspec.structs.replace(kind, **marks) for kind in fitting)

    def _decode(self, step: Bucket) -> Iterator[Bucket]:
        """Yield buckets for a step of decode rows; rows grow before columns."""
        queries = 1 << (step.queries - 1).bit_length()
        queries = min(queries, max(step.queries, self._most_queries))
        for columns in self._columns(step.columns):
            for rows in self._row_counts(step):
                yield self._bucket(rows, columns=columns, queries=queries)

    def _row_counts(self, step: Bucket) -> list[int]:
        """Return the numbers of rows of buckets for a step of decode rows, in ascending order.

        No step that has the bits of others is computed as one that has not.
        """
        if step.chained:
            return [padded_rows(step.rows)]
        counts = _from(self._rows, step.rows)
        is_exact = not (step.deterministic or step.extra_columns) and step.queries == 1
        if is_exact and 1 < self._exact_rows >= step.rows:
            return [rows for rows in counts if rows <= self._exact_rows]
        return counts

    def _prompts(self, step: Bucket) -> Iterator[Bucket]:
        """Yield buckets for a step of prompts; tokens grow before columns, and columns before sequences."""
        tokens = _from(self._tokens, step.prompt_tokens)
        most = max(tokens[0], int(_MOST_WASTE * step.prompt_tokens))
        for seqs in _from(self._seqs, step.prompt_seqs):
            for columns in _from(self._prompt_columns, step.columns):
                for count in itertools.takewhile(lambda count: count <= most, tokens):
                    yield self._bucket(0, count, seqs, columns)

    def _mixed(self, step: Bucket) -> Iterator[Bucket]:
        """Yield buckets for a step of both kinds; columns grow before rows.

        There are none for rows with drafts: a recording of the rows and one of the prompts compute such a step.
        """
        if step.queries > 1:
            return
        tokens = next(iter(_from(self._mixed_tokens, step.prompt_tokens)), None)
        if tokens is None:
            return
        for seqs in _from(self._mixed_seqs, step.prompt_seqs):
            if seqs > _MIXED_CROWD and tokens > _MOST_FORCED:
                return
            for rows in _from(self._mixed_rows, step.rows):
                for columns in _from(self._prompt_columns, step.columns):
                    yield self._bucket(rows, tokens, seqs, columns)

    def _bucket(
        self, rows: int, tokens: int = 0, seqs: int = 0, columns: int = 0, queries: int = 1
    ) -> Bucket:
        # A step has at most `max_num_seqs` sequences of both kinds together; decode rows may have drafts, or be unused.
        most = self._most_seqs if seqs else self._most_logits
        return Bucket(
            rows=rows,
            queries=queries,
            prompt_tokens=tokens,
            prompt_seqs=seqs,
            columns=columns,
            num_logits=min(rows * queries + seqs, most),
            has_states=self._has_states,
        )

    def _columns(self, least: int) -> Iterator[int]:
        """Yield the numbers of columns for decode rows that hold at least `least` blocks."""
        columns = _FEWEST_COLUMNS
        while columns < self._most_columns:
            if columns >= least:
                yield columns
            columns *= 2
        if least <= self._most_columns:
            yield self._most_columns


def recorded_bytes(limits: SchedulerConfig, block_size: int, row_bytes: int) -> int:
    """Return the device memory of inputs and results of all recordings that are made ahead.

    Block tables are most of it: 138 MiB for 256 sequences of 131072 tokens. Intermediate results are not included.

    Args:
        limits: of a step.
        block_size: tokens per block.
        row_bytes: bytes of a row of logits.
    """
    results = (limits.max_logits + limits.max_num_seqs) * row_bytes
    return results + sum(map(input_bytes, BucketGrid(limits, block_size).ahead()))


def _from(counts: list[int], least: int) -> list[int]:
    """Return the counts that are at least `least`; `counts` is in ascending order."""
    return counts[bisect.bisect_left(counts, least) :]


def padded_rows(rows: int) -> int:
    """Return as how many rows a step of `rows` rows, at most `SchedulerConfig.exact_rows`, is computed."""
    return 1 << (rows - 1).bit_length()


def row_counts(most: int, exact_rows: int = 1) -> list[int]:
    """Return the numbers of decode rows that have buckets.

    Args:
        most: limit of sequences in a step.
        exact_rows: of `SchedulerConfig`.

    Returns:
        1, 2, 4, 8, then every 16th up to 128 and every 32nd beyond, ending with `most`, or with the next power of two
        if that is at most `exact_rows`: such steps have the bits of others.
    """
    if most <= exact_rows:
        return [1 << i for i in range((most - 1).bit_length() + 1)]
    small = [1, 2, 4, 8, *range(_ROW_STEP, _LARGE_ROWS + 1, _ROW_STEP)]
    counts = [*small, *range(_LARGE_ROWS + _LARGE_ROW_STEP, most, _LARGE_ROW_STEP)]
    return [*(n for n in counts if n < most), most]


def token_counts(most: int, fewest: int = _FEWEST_TOKENS, parts: int = 4) -> list[int]:
    """Return the numbers of prompt tokens that have buckets.

    Args:
        most: limit of tokens in a step.
        fewest: the smallest number, a power of two.
        parts: how many numbers there are from one power of two up to the next.

    Returns:
        By default 16, 20, 24, 28, 32, 40, ..., ending with `most`.
    """
    doubled = (fewest << i for i in itertools.count())
    powers = itertools.takewhile(lambda power: power < most, doubled)
    counts = [power + part * (power // parts) for power in powers for part in range(parts)]
    return [*(n for n in counts if n < most), most]


def shared_count(blocks: int) -> int:
    """Return the largest number of shared blocks, at most `blocks`, that has buckets."""
    if blocks < _FEWEST_SHARED:
        return blocks // _SHARED_STEP * _SHARED_STEP
    power = 1 << (blocks.bit_length() - 1)
    return blocks // (power // 4) * (power // 4)
