"""The records of a request to the engine and of its answer per token.

They cross the process boundary, so they are msgspec structs of plain data.
"""

from __future__ import annotations

import enum

import msgspec

from model.sampling.parameters import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a sequence ended."""

    EOS = 1
    """The model produced one of its own end-of-sequence tokens."""
    STOP = 2
    """A stop token id or a stop string of the request was met."""
    LENGTH = 3
    """The request's token limit or the model's context is used up."""
    ABORT = 4
    """The client went away or asked to stop."""
    ERROR = 5
    """The engine could not go on with this sequence; `TokenEvent.error` says why."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """One prompt to continue.

    Attributes:
        request_id: unique among all requests of the front end that made it.
        prompt_token_ids: at least one token id, each in [0, vocab_size).
        sampling: how tokens are chosen.
    """

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One generated token of one request, or the end of it.

    Attributes:
        token_id: None where the sequence ended without a new token (abort, error).
        logprob: natural logarithm of the token's probability under the unmodified logits; None where not asked for.
        top_tokens: (token id, log-probability), most likely first.
        finish_reason: set on a request's last event alone.
        error: what went wrong, with FinishReason.ERROR alone.
    """

    token_id: int | None
    logprob: float | None = None
    top_tokens: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
