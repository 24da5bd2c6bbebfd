"""Appends sampled and forced tokens to a sequence, and makes the events that report them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from server.engine.core.request import FinishReason, TokenEvent

if TYPE_CHECKING:
    from collections.abc import Sequence as TypingSequence

    from server.engine.core.results.step_events import StepEvents
    from server.engine.core.sequence import Sequence
    from server.engine.core.step import SampledResult

log = logging.getLogger("tessera.engine")

_GRAMMAR_FAILED: Final = "the grammar cannot be followed: an internal error"


def leading(
    sampled: TypingSequence[SampledResult], draft: tuple[int, ...]
) -> TypingSequence[SampledResult]:
    """Return the results of a decode row up to the first that is not its draft's token.

    Those after it were computed from a token that the sequence does not have.
    """
    for count, (result, token_id) in enumerate(zip(sampled, draft, strict=False), 1):
        if result.token_id != token_id:
            return sampled[:count]
    return sampled


def append_sampled(
    sequence: Sequence, sampled: TypingSequence[SampledResult], events: StepEvents
) -> FinishReason | None:
    """Append the sampled tokens of a row, up to the first that ends the sequence or after which others are forced.

    Args:
        sequence: of the row.
        sampled: its results; one with an error ends the sequence.
        events: receives the event of each token.

    Returns:
        Why the sequence ends, if it does. `ERROR` comes with the sequence's `error` and without an event.
    """
    matcher = sequence.matcher if sequence.sampling.skips_forced_tokens else None
    for count, result in enumerate(sampled, 1):
        if result.error is not None:
            return _fail(sequence, result.error)
        assert result.token_id is not None, "a result has a token or an error"
        try:
            reason = sequence.append(result.token_id)
            ends = reason is not None
            if matcher is not None and not ends and count < len(sampled):
                # The model may choose other tokens for the text than those that the tokenizer makes of it.
                ends = bool(matcher.forced_tokens())
        except Exception:
            log.exception("the grammar of request %d failed", sequence.request_id)
            return _fail(sequence, _GRAMMAR_FAILED)
        if reason is FinishReason.ERROR:
            return reason
        event = TokenEvent(
            token_id=result.token_id,
            logprob=result.logprob,
            top_tokens=result.top,
            finish_reason=reason,
        )
        events.add(sequence.request_id, event)
        if ends:
            return reason
    return None


def append_forced(sequence: Sequence, events: StepEvents) -> FinishReason | None:
    """Append the tokens that the grammar forces next; otherwise as `append_sampled`.

    A token in flight was sampled at the position of the first of them, so its result is void.
    """
    assert sequence.matcher is not None
    try:
        forced = sequence.matcher.forced_tokens()
        for token_id in forced:
            if (reason := sequence.append(token_id)) is FinishReason.ERROR:
                return reason
            event = TokenEvent(token_id=token_id, finish_reason=reason)
            events.add(sequence.request_id, event)
            if reason is not None:
                break
        else:
            reason = None
    except Exception:
        log.exception("the grammar of request %d failed", sequence.request_id)
        return _fail(sequence, _GRAMMAR_FAILED)
    if forced and sequence.num_tokens_in_flight:
        void_results_in_flight(sequence)
    return reason


def void_results_in_flight(sequence: Sequence) -> None:
    """Note that forced tokens took the positions of those in flight."""
    sequence.num_void_results = sequence.num_tokens_in_flight
    sequence.num_tokens_in_flight = 0
    sequence.check_at = 0


def _fail(sequence: Sequence, error: str) -> FinishReason:
    sequence.error = error
    return FinishReason.ERROR
