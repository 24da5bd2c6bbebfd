"""What one request asks of the engine, and what the engine answers per token.

These records cross the process boundary, so they are msgspec structs: plain data. They know neither text nor HTTP.
"""

from __future__ import annotations

import enum

import msgspec


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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's tokens are chosen. Every field is resolved: defaults and limits were applied at the edge.

    Attributes:
        max_new_tokens: tokens, at least 1.
        min_new_tokens: tokens; end-of-sequence and stop ids cannot be drawn before that many were generated.
        temperature: 0 means greedy: the remaining filters are then ignored, penalties are not.
        top_k: tokens kept; 0 keeps all.
        top_p: probability mass kept, in (0, 1]; 1 keeps all.
        min_p: smallest probability kept, relative to the most likely token, in [0, 1]; 0 keeps all.
        typical_p: mass of locally typical tokens kept, in (0, 1]; 1 keeps all.
        repetition_penalty: > 0; divides positive and multiplies negative logits of the tokens in prompt and output;
            1 is off.
        presence_penalty: subtracted once from the logit of every token in the output; 0 is off.
        frequency_penalty: subtracted from a token's logit once for each time it is in the output; 0 is off.
        seed: unsigned 64-bit; with a token's position it alone decides that token's draw.
        eos_token_ids: the model's own end tokens; empty when the request ignores them.
        stop_token_ids: further ids that end the sequence.
        logprobs: whether each token comes with its log-probability.
        top_logprobs: most likely tokens reported at each position; 0 for none.
        prompt_logprobs: whether the log-probabilities of the prompt's tokens are reported; such a request takes
            no blocks from the prefix cache, since every position must be computed.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    @property
    def takes_most_likely(self) -> bool:
        """Whether each token is the most likely one by the scores as they are, and no others are to be told of."""
        plain = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) == (
            1,
            0,
            0,
        )
        wants_more = self.top_logprobs or self.min_new_tokens
        return self.temperature == 0 and plain and not wants_more


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
