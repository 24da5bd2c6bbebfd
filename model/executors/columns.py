"""The columns of a step: the arrays that its forward pass reads, one record each, and the bucket that sizes them.

Tokens are packed, decode rows first, then the prompt chunks one after the other:

    token   0 ..                              R * queries ..
            row 0 | row 1 | ... | unused      chunk of p0 | chunk of p1 | ... | unused

A new column is a record in `COLUMNS`. Input, copies, sizes in bytes and messages between ranks follow from it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

A = TypeVar("A")


class Want(enum.Enum):
    """What a step computes beside its keys and values."""

    TOKENS = "tokens"
    """The requested rows of logits."""
    PROMPT_SCORES = "prompt scores"
    """Also the log-probabilities of given tokens, and the most likely tokens in their place."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a step's arrays; a smaller step leaves the rest unused.

    Attributes:
        rows: R, number of decode rows, each of one sequence.
        queries: most tokens of a decode row: 1, or more if tokens that were proposed for a sequence are computed too.
        prompt_tokens: P, number of tokens of all other sequences.
        prompt_seqs: Q, number of those sequences.
        columns: C, blocks of the longest sequence.
        num_logits: M, rows of logits.
        shared_blocks: leading blocks that all decode rows' sequences share; attention reads them once for all rows.
            0 if `deterministic`.
        deterministic: whether a token's results must have the same bits in every step that could compute it: with any
            other tokens, as part of any chunk, and in any bucket with this field.
        chained: whether a row may be a token that follows those of the rows before it in one sequence. Such rows have
            the bits of separate steps where a single launch computes them.
        has_states: whether layers have a state of fixed size, so that the step has `state_slots`.
        extra_columns: names of the columns with a value per sequence that the step has; see `Column.value`.
        want: what is computed.
        top: most likely tokens in place of each given one; 0 unless prompts are scored.
    """

    rows: int
    queries: int = 1
    prompt_tokens: int = 0
    prompt_seqs: int = 0
    columns: int
    num_logits: int
    shared_blocks: int = 0
    deterministic: bool = False
    chained: bool = False
    has_states: bool = False
    extra_columns: tuple[str, ...] = ()
    want: Want = Want.TOKENS
    top: int = 0

    @property
    def decode_tokens(self) -> int:
        """Tokens of all decode rows."""
        return self.rows * self.queries

    @property
    def tokens(self) -> int:
        """T, all tokens."""
        return self.rows * self.queries + self.prompt_tokens

    @property
    def has_all_logits(self) -> bool:
        """Whether row i of the logits is that of token i for every token, so that `logits_rows` is not read."""
        return not self.prompt_seqs and self.num_logits == self.decode_tokens


class Column(NamedTuple):
    """An array of a step.

    Attributes:
        name: attribute of `StepArrays`.
        dtype: of NumPy.
        size: its shape in a bucket.
        fill: what a new input contains.
        value: for a column with one value per sequence, [R + Q], decode rows first: the value of a sequence of the
            engine, which must not change while the sequence keeps its blocks. A step has the column if a sequence has
            another value than `fill`. None for the columns that `PackedStep` writes, which every step has.
    """

    name: str
    dtype: type[np.generic]
    size: Callable[[Bucket], tuple[int, ...]]
    fill: int = 0
    value: Callable[[Any], int] | None = None


ADAPTER: Final = "adapter"
"""The column of steps in which a sequence has an adapter."""


def per_sequence(bucket: Bucket) -> tuple[int, ...]:
    """Return the shape of a column with one value per sequence."""
    return (bucket.rows + bucket.prompt_seqs,)


def _tokens_kept(bucket: Bucket) -> tuple[int, ...]:
    """Return the tokens after which a state may be kept in another slot than that of the sequence."""
    drafted = bucket.decode_tokens if bucket.queries > 1 else 0
    return (bucket.prompt_tokens + drafted if bucket.has_states else 0,)


COLUMNS: Final[tuple[Column, ...]] = (
    Column("token_ids", np.int64, lambda b: (b.tokens,)),
    Column("positions", np.int64, lambda b: (b.tokens,)),
    Column("slot_mapping", np.int32, lambda b: (b.tokens,), fill=-1),
    Column("logits_rows", np.int64, lambda b: (b.num_logits,)),
    Column("sampled_rows", np.int64, lambda b: (b.num_logits,)),
    Column(
        "next_ids",
        np.int64,
        lambda b: (b.tokens if b.want is Want.PROMPT_SCORES else 0,),
        fill=-1,
    ),
    Column("earlier", np.int32, lambda b: (b.rows,)),
    Column("cu_seqlens", np.int32, lambda b: (b.rows + 1,)),
    Column("seq_lens", np.int32, lambda b: (b.rows,)),
    Column("block_table", np.int32, lambda b: (b.rows, b.columns)),
    Column("prompt_cu_seqlens", np.int32, lambda b: (b.prompt_seqs + 1,)),
    Column("prompt_seq_lens", np.int32, lambda b: (b.prompt_seqs,)),
    Column("prompt_block_table", np.int32, lambda b: (b.prompt_seqs, b.columns)),
    Column(
        "state_slots",
        np.int32,
        lambda b: (b.rows + b.prompt_seqs if b.has_states else 0, 2),
        fill=-1,
    ),
    Column("kept_slots", np.int32, _tokens_kept, fill=-1),
    Column(ADAPTER, np.int32, per_sequence, fill=-1, value=attrgetter("adapter_slot")),
)
"""Read when a bucket is made and when its input is allocated, not in a step."""


class StepArrays(Generic[A]):
    """The columns of a step by name: NumPy arrays on the host, tensors on the device.

    Attributes:
        token_ids: [T]; -1 - i stands for the token at index i of the sampled tokens.
        positions: [T], position of each token in its sequence.
        slot_mapping: [T], cache slot for each token's keys and values; -1 writes nothing.
        logits_rows: [M], the tokens for which logits are computed; not read if `Bucket.has_all_logits`.
        sampled_rows: [M], index in the sampled tokens at which the token of each row of logits is stored; may repeat.
        next_ids: [T] if prompts are scored, else [0]: the token after each token, whose log-probability is computed; -1
            for none.
        earlier: [R], how many of the rows right before are of the same sequence; 0 unless `Bucket.chained`.
        cu_seqlens: [R + 1], for the decode rows, whose first token is token 0.
        seq_lens: [R], for the decode rows; 0 for an unused row.
        block_table: [R, C], for the decode rows.
        prompt_cu_seqlens: [Q + 1], for the chunks, whose first token is token R * queries.
        prompt_seq_lens: [Q].
        prompt_block_table: [Q, C].
        state_slots: [R + Q, 2] if layers have a state of fixed size, else [0, 2]; decode rows first. The slots that the
            state of each sequence is read from and written to, which may be the same one; -1 reads zeros, or writes
            nothing.
        kept_slots: [P] if layers have a state of fixed size, else [0]: for each token of the chunks, the slot to which
            the state after it is written too; -1 for none. [R * queries] for the decode rows of a step with drafts,
            which has no chunks.
        adapter: [R + Q], decode rows first: the slot of each sequence's adapter, -1 for none; only where a sequence has
            one.
    """

    def __init__(self, arrays: Iterable[tuple[str, A]]) -> None:
        self.__dict__.update(arrays)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> A: ...


def columns_of(bucket: Bucket) -> list[Column]:
    """Return the columns of a step."""
    return [it for it in COLUMNS if it.value is None or it.name in bucket.extra_columns]


def extra_columns(sequences: Iterable[Any]) -> tuple[str, ...]:
    """Return the names, in order, of the columns with a value per sequence that a step of these sequences has."""
    valued = [(it.name, it.value, it.fill) for it in COLUMNS if it.value is not None]
    if not valued:
        return ()
    members = list(sequences)
    return tuple(
        sorted(name for name, value, fill in valued if any(value(s) != fill for s in members))
    )


def input_bytes(bucket: Bucket) -> int:
    """Return the bytes of a step's arrays."""
    return sum(
        math.prod(it.size(bucket)) * np.dtype(it.dtype).itemsize for it in columns_of(bucket)
    )
