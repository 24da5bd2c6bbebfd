"""Records and interfaces between scheduler and model runner: the work of a step and its results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as TypingSequence
from concurrent.futures import Future
from operator import attrgetter
from typing import Protocol, overload

import msgspec

from model.sampling.parameters import SamplingParams
from server.engine.core.grammar import Matcher
from server.engine.core.sequence import Sequence

_deterministic = attrgetter("deterministic")
_adapter = attrgetter("adapter")


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
        draft: of a decode row, the tokens that were proposed to follow its own.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int
    draft: tuple[int, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether it is a decode row: one token, and maybe its draft."""
        return self.num_tokens == 1 + len(self.draft)

    @property
    def sampled_positions(self) -> range:
        """Positions of the tokens that its rows of logits sample."""
        stop = self.start + self.num_tokens + 1
        return range(stop - self.num_logits, stop)


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
        has_adapters: whether one of them has one.
        extra_columns: of the steps with these sequences, see `Bucket`; None until they are known.
    """

    __slots__ = (
        "__weakref__",
        "deterministic",
        "extra_columns",
        "has_adapters",
        "request_ids",
        "sequences",
    )

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.request_ids = [sequence.request_id for sequence in sequences]
        self.deterministic = any(map(_deterministic, sequences))
        self.has_adapters = any(map(_adapter, sequences))
        self.extra_columns: tuple[str, ...] | None = None


class DecodeRows(TypingSequence[ScheduledSequence]):
    """The rows of a step with one token, and maybe a draft, by column: a row that only continues needs no object.

    A draft are tokens proposed to follow the row's own token. They are computed with it, and each of them has a row of
    logits too. The sampled tokens up to the first that is not the draft's are those that as many steps would sample.
    The host knows the own token of a row with a draft: no token of its sequence is in flight.

    Read as a sequence, its entries are made when they are read.

    Attributes:
        batch: the sequences.
        starts: position of each row's token.
        num_sampling: number of leading rows whose tokens all have a row of logits; the others have none, and no draft.
        drafts: by row; None if no row has one.
        num_logits: rows of logits.
    """

    __slots__ = ("batch", "drafts", "num_logits", "num_sampling", "starts")

    def __init__(
        self,
        batch: DecodeBatch,
        starts: list[int],
        num_sampling: int,
        drafts: list[tuple[int, ...]] | None = None,
    ) -> None:
        assert num_sampling <= len(starts) == len(batch.sequences)
        self.batch, self.starts, self.num_sampling = batch, starts, num_sampling
        self.drafts, self.num_logits = drafts, num_sampling
        if drafts is not None:
            assert len(drafts) == len(starts)
            assert not any(drafts[num_sampling:]), "rows without logits have no draft"
            self.num_logits += sum(map(len, drafts))

    @classmethod
    def of(cls, rows: Iterable[ScheduledSequence]) -> DecodeRows:
        """Return columns of rows for which `is_decode`, those without logits last."""
        rows = list(rows)
        has_logits = [row.num_logits > 0 for row in rows]
        assert has_logits == sorted(has_logits, reverse=True), "rows without logits come last"
        batch = DecodeBatch([row.sequence for row in rows])
        drafts = [row.draft for row in rows]
        starts = [row.start for row in rows]
        return cls(batch, starts, sum(has_logits), drafts if any(drafts) else None)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.starts) + self.num_logits - self.num_sampling

    @property
    def sampling_sequences(self) -> list[Sequence]:
        """The sequence of each row of logits."""
        sequences = self.batch.sequences[: self.num_sampling]
        if self.drafts is None:
            return sequences
        pairs = zip(sequences, self.drafts, strict=False)
        return [sequence for sequence, draft in pairs for _ in range(1 + len(draft))]

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, row: int) -> ScheduledSequence: ...

    @overload
    def __getitem__(self, row: slice) -> list[ScheduledSequence]: ...

    def __getitem__(self, row: int | slice) -> ScheduledSequence | list[ScheduledSequence]:
        if isinstance(row, slice):
            return list(self)[row]
        return self._row(range(len(self.starts))[row])

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return map(self._row, range(len(self.starts)))

    def _row(self, row: int) -> ScheduledSequence:
        draft = () if self.drafts is None else self.drafts[row]
        num_tokens = 1 + len(draft)
        num_logits = num_tokens if row < self.num_sampling else 0
        sequence, start = self.batch.sequences[row], self.starts[row]
        return ScheduledSequence(sequence, start, num_tokens, num_logits, draft)


NO_ROWS = DecodeRows(DecodeBatch([]), [], 0)


class SchedulerOutput(msgspec.Struct, frozen=True):
    """The work of one step. The batch consists of the rows of `decode`, then those of `prefill`.

    Attributes:
        step: number of this step.
        decode: sequences with one token and maybe a draft, those without logits last.
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
        token_ids: of the decode rows' rows of logits, in their order; -1 for one of `others`.
        prefill: for each prefill row, the tokens that continue its sequence.
        logprobs: by index in `token_ids`, the natural logarithms of the probabilities of tokens, if requested.
        others: by index in `token_ids`, the results with more than that: most likely tokens, or an error.
    """

    token_ids: list[int]
    prefill: TypingSequence[TypingSequence[SampledResult]] = ()
    logprobs: dict[int, float] = {}
    others: dict[int, SampledResult] = {}

    @classmethod
    def of(
        cls, decode: Iterable[SampledResult], prefill: TypingSequence[TypingSequence[SampledResult]]
    ) -> SampledRows:
        """Return the columns of the results of the decode rows' rows of logits."""
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

    def result(self, index: int) -> SampledResult:
        """Return the result of a row of logits of a decode row."""
        if (other := self.others.get(index)) is not None:
            return other
        return TokenResult(self.token_ids[index], self.logprobs.get(index))

    def by_row(self, counts: Iterable[int]) -> list[TypingSequence[SampledResult]]:
        """Return the results of each row, decode rows first; `counts` are the rows of logits of each of those."""
        found: list[TypingSequence[SampledResult]] = []
        end = 0
        for count in counts:
            first, end = end, end + count
            found.append([self.result(index) for index in range(first, end)])
        return [*found, *self.prefill]


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

    def compile_grammar(self, sampling: SamplingParams) -> Future[Matcher]:
        """Start to compile the grammar of a request on another thread."""

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Start a step on the device without waiting for its results."""

    def forget(self, request_id: int) -> None:
        """Drop the state kept for a sequence that ended; unknown ids are ignored."""

    def recover(self, error: Exception) -> bool:
        """Clean up after a step that raised; return whether later steps can succeed."""

    def use_idle_time(self) -> bool:
        """Do one piece of preparatory work; return whether there was any to do."""
