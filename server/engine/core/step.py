"""Records and interfaces between scheduler and model runner: the work of a step and its results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as TypingSequence
from concurrent.futures import Future
from operator import attrgetter
from typing import Protocol, overload

import msgspec

from server.engine.core.grammar import Matcher
from server.engine.core.sequence import Sequence

_deterministic = attrgetter("deterministic")


class SampledResult(Protocol):
    """The sampler's result for one row of logits."""

    @property
    def token_id(self) -> int | None:
        """The token id; ignored if `error` is set."""

    @property
    def logprob(self) -> float | None:
        """Natural logarithm of its probability, if requested."""

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """(token id, log-probability), most likely first."""

    @property
    def error(self) -> str | None:
        """Why no token could be sampled; None if one was."""


class FailedResult(msgspec.Struct, frozen=True):
    """The result of a row that could not be computed."""

    error: str
    token_id: None = None
    logprob: None = None
    top: tuple[()] = ()


class TokenResult(msgspec.Struct, frozen=True):
    """The result of a row that is a token and, if requested, its log-probability."""

    token_id: int
    logprob: float | None = None
    top: tuple[()] = ()
    error: None = None


class ScheduledSequence(msgspec.Struct, frozen=True):
    """One sequence's part of a step: its tokens `start .. start + num_tokens`.

    Attributes:
        sequence: the sequence.
        start: position of the first token; equals `sequence.num_computed_tokens`.
        num_tokens: at least 1.
        num_logits: number of the last tokens that get a row of logits: 0 if the step ends before the last known token,
            1 to sample the next token, more to verify proposed tokens.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int


class DecodeBatch:
    """The sequences of decode rows, in the order of the rows; never changed.

    Successive steps with the same sequences have the same object, unless a forced token has taken the position of one
    in flight. So each sequence has kept its blocks. A row with logits in both steps computes the token that it sampled
    in the first, and the host knows the tokens of all such rows or of none; another row may be part of a longer chunk.
    What follows from the sequences and their blocks can be kept by the identity of the batch.

    Attributes:
        sequences: of the rows.
        request_ids: theirs.
        deterministic: whether one of them is.
    """

    __slots__ = ("__weakref__", "deterministic", "request_ids", "sequences")

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.request_ids = [sequence.request_id for sequence in sequences]
        self.deterministic = any(map(_deterministic, sequences))


class DecodeRows(TypingSequence[ScheduledSequence]):
    """The rows of a step with exactly one token, by column: a row that only continues decoding needs no object.

    Read as a sequence, its entries are made when they are read.

    Attributes:
        batch: the sequences.
        starts: position of each row's token.
        num_logits: number of leading rows that have a row of logits; the others have none.
    """

    __slots__ = ("batch", "num_logits", "starts")

    def __init__(self, batch: DecodeBatch, starts: list[int], num_logits: int) -> None:
        assert num_logits <= len(starts) == len(batch.sequences)
        self.batch, self.starts, self.num_logits = batch, starts, num_logits

    @classmethod
    def of(cls, rows: Iterable[ScheduledSequence]) -> DecodeRows:
        """Return columns of rows that have one token each, those without logits last."""
        rows = list(rows)
        has_logits = [row.num_logits for row in rows]
        assert has_logits == sorted(has_logits, reverse=True), "rows without logits come last"
        batch = DecodeBatch([row.sequence for row in rows])
        return cls(batch, [row.start for row in rows], sum(has_logits))

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, row: int) -> ScheduledSequence: ...

    @overload
    def __getitem__(self, row: slice) -> list[ScheduledSequence]: ...

    def __getitem__(self, row: int | slice) -> ScheduledSequence | list[ScheduledSequence]:
        if isinstance(row, slice):
            return list(self)[row]
        row = range(len(self.starts))[row]
        has_logits = int(row < self.num_logits)
        return ScheduledSequence(self.batch.sequences[row], self.starts[row], 1, has_logits)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        pairs = zip(self.batch.sequences, self.starts, strict=True)
        for row, (sequence, start) in enumerate(pairs):
            yield ScheduledSequence(sequence, start, 1, int(row < self.num_logits))


NO_ROWS = DecodeRows(DecodeBatch([]), [], 0)


class SchedulerOutput(msgspec.Struct, frozen=True):
    """The work of one step. The batch consists of the rows of `decode`, then those of `prefill`.

    Attributes:
        step: number of this step.
        decode: sequences with exactly one token, those without logits last.
        prefill: sequences with two tokens or more.
        num_tokens: total tokens; 0 if there is nothing to do.
        first_scheduled: sequences that are scheduled for the first time.
        preempted: request ids of the sequences that this step's scheduling preempted.
    """

    step: int
    decode: DecodeRows
    prefill: tuple[ScheduledSequence, ...]
    num_tokens: int
    first_scheduled: tuple[Sequence, ...]
    preempted: tuple[int, ...]


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the prompt tokens that follow each token of a chunk.

    Attributes:
        start: position of the chunk's first token.
        logprobs: natural logarithms, of the tokens from `start + 1` on.
        top_tokens: (token id, log-probability) of the most likely tokens at the same positions; empty if not requested.
    """

    start: int
    logprobs: list[float]
    top_tokens: list[list[tuple[int, float]]] = []


class SampledRows(msgspec.Struct, frozen=True):
    """The sampled tokens of a step.

    Attributes:
        token_ids: of the decode rows with logits; -1 for a row of `others`.
        prefill: for each prefill row, the tokens that continue its sequence.
        logprobs: by decode row, the natural logarithms of the probabilities of tokens, if requested.
        others: by decode row, the results with more than that: most likely tokens, or an error.
    """

    token_ids: list[int]
    prefill: TypingSequence[TypingSequence[SampledResult]] = ()
    logprobs: dict[int, float] = {}
    others: dict[int, SampledResult] = {}

    @classmethod
    def of(
        cls, decode: Iterable[SampledResult], prefill: TypingSequence[TypingSequence[SampledResult]]
    ) -> SampledRows:
        """Return the columns of the results of the decode rows with logits."""
        token_ids: list[int] = []
        logprobs: dict[int, float] = {}
        others: dict[int, SampledResult] = {}
        for row, result in enumerate(decode):
            if result.error is not None or result.top or result.token_id is None:
                token_ids.append(-1)
                others[row] = result
                continue
            token_ids.append(result.token_id)
            if result.logprob is not None:
                logprobs[row] = result.logprob
        return cls(token_ids, prefill, logprobs, others)

    def decode_row(self, row: int) -> tuple[SampledResult, ...]:
        """Return the result of a decode row; none if it has no logits."""
        if row >= len(self.token_ids):
            return ()
        if (other := self.others.get(row)) is not None:
            return (other,)
        return (TokenResult(self.token_ids[row], self.logprobs.get(row)),)

    def by_row(self, num_decode: int) -> list[TypingSequence[SampledResult]]:
        """Return the results of each row, of which the first `num_decode` are decode rows."""
        return [*map(self.decode_row, range(num_decode)), *self.prefill]


class StepResult(msgspec.Struct, frozen=True):
    """Results of a step.

    Attributes:
        sampled: the tokens.
        prompt_logprobs: by request id, for sequences that requested them.
    """

    sampled: SampledRows
    prompt_logprobs: dict[int, PromptLogprobs]


class PendingStep(Protocol):
    """A step that was launched on the device."""

    def sample(self) -> None:
        """Start sampling, if that had to wait for the results of the step before; called once they are committed."""

    @property
    def feeds_next(self) -> bool:
        """Whether the next step can be launched before the results of this one are known; read after `sample`."""

    def result(self) -> StepResult:
        """Wait for the results."""


class StepRunner(Protocol):
    """Computes steps; implemented by `server.engine.runner.step.model_runner.ModelRunner`."""

    def compile_grammar(self, grammar: str) -> Future[Matcher]:
        """Start to compile a serialized grammar on another thread."""

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Start a step on the device without waiting for its results."""

    def forget(self, request_id: int) -> None:
        """Drop the state kept for a sequence that ended; unknown ids are ignored."""

    def recover(self, error: Exception) -> bool:
        """Clean up after a step that raised; return whether later steps can succeed."""

    def use_idle_time(self) -> bool:
        """Do one piece of preparatory work; return whether there was any to do."""
