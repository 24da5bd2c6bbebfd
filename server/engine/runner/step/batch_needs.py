"""What the decode rows of a step need beyond the next token: kept while the batch is the same."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from server.engine.core.sequence import Sequence
    from server.engine.core.step import DecodeBatch, DecodeRows, ScheduledSequence


_argmax_from = attrgetter("argmax_from")
_prompt_logprobs = attrgetter("prompt_logprobs")
_logprobs = attrgetter("logprobs")


class BatchNeeds(NamedTuple):
    """What a step needs beyond the next tokens.

    Attributes:
        all_argmax: whether the token of each row of logits is the argmax.
        any_scored: whether prompt tokens are scored, for which recordings compute no logits.
        logprobs: whether a sequence reports the log-probabilities of its tokens.
    """

    all_argmax: bool
    any_scored: bool
    logprobs: bool

    def __or__(self, other: BatchNeeds) -> BatchNeeds:
        """Return what two parts of a step need."""
        return BatchNeeds(
            self.all_argmax and other.all_argmax,
            self.any_scored or other.any_scored,
            self.logprobs or other.logprobs,
        )


def scores_prompt(sequence: Sequence) -> bool:
    """Return whether the next step of a sequence scores prompt tokens."""
    return sequence.sampling.prompt_logprobs and not sequence.num_known_output_tokens


def needs_of_prompts(prefill: Iterable[ScheduledSequence]) -> BatchNeeds:
    """Return what the rows of prompts need."""
    return BatchNeeds(
        all(
            row.sampled_positions[0] - row.sequence.num_prompt_tokens
            >= row.sequence.sampling.argmax_from
            for row in prefill
            if row.num_logits
        ),
        any(scores_prompt(row.sequence) for row in prefill),
        any(row.sequence.sampling.logprobs for row in prefill),
    )


class DecodeNeeds:
    """Determines what decode rows need; keeps what a longer output of the same sequences cannot change."""

    def __init__(self) -> None:
        self._batch: DecodeBatch | None = None
        self._num_sampling = 0
        self._needs = BatchNeeds(all_argmax=True, any_scored=False, logprobs=False)

    def of(self, decode: DecodeRows) -> BatchNeeds:
        """Return what the rows of a step that is about to be launched need."""
        if decode.batch is self._batch and decode.num_sampling == self._num_sampling:
            return self._needs
        sequences = decode.batch.sequences
        samplings = [sequence.sampling for sequence in sequences]
        # The parameters suffice for most batches.
        argmax_from = max(map(_argmax_from, samplings[: decode.num_sampling]), default=0)
        needs = BatchNeeds(
            argmax_from == 0
            or all(sequence.is_argmax for sequence in sequences[: decode.num_sampling]),
            any(map(_prompt_logprobs, samplings)) and any(map(scores_prompt, sequences)),
            any(map(_logprobs, samplings)),
        )
        # Later tokens stay argmax, and prompts stay scored; the opposite may change with any token.
        is_final = needs.all_argmax and not needs.any_scored
        self._batch = decode.batch if is_final else None
        self._num_sampling, self._needs = decode.num_sampling, needs
        return needs
