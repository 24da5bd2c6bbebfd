"""Records of a request to the engine and of its generated tokens.

They are sent between processes, so they are msgspec structs of plain data.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from model.sampling.parameters import SamplingParams

MAX_DRAFT_TOKENS: Final = 31
"""Tokens that can be proposed at once: with that of the sequence, 32 rows of logits."""


class FinishReason(enum.IntEnum):
    """Why a sequence ended."""

    EOS = 1
    """The model produced one of its own end-of-sequence tokens, or the output is a complete text of its grammar."""
    STOP = 2
    """The output reached a stop token id or a stop string of the request."""
    LENGTH = 3
    """The output reached the request's token limit or the end of the model's context."""
    ABORT = 4
    """The client disconnected, or the request was aborted by its id."""
    ERROR = 5
    """The engine could not continue the sequence; `TokenEvent.error` says why."""
    TIMEOUT = 6
    """The request's deadline passed."""


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter that the front end has checked.

    Attributes:
        name: by which requests choose it.
        path: of its folder on this machine.
        digest: of its files, see `model.adapters.file.AdapterFile`; the engine uses no other ones.
        shows_paths: whether an error may tell the request's client paths of this machine.
    """

    name: str
    path: str
    digest: str
    shows_paths: bool = False


class GenerateRequest(
    msgspec.Struct, frozen=True, kw_only=True, tag="generate", omit_defaults=True
):
    """A request to continue one prompt.

    Attributes:
        request_id: unique among all requests of the front end that made it.
        prompt_token_ids: at least one token id, each in [0, vocab_size).
        sampling: how tokens are chosen.
        external_id: the id that the client knows it by; several requests may have the same one. Empty for none.
        priority: the scheduler serves requests with a lower number first, whoever sent them.
        client_priority: orders the requests of one client with one priority: those with a lower number first.
        deadline: when the request ends, complete or not: `time.monotonic` seconds, which all processes of a machine
            share. None for never.
        cache_salt: the request uses only cached blocks of requests with an equal salt.
        client: who sent it, in any form; clients get equal shares of the engine.
        deterministic: whether its tokens and log-probabilities must have the same bits whatever else the engine
            computes; the engine must support it.
        max_draft_tokens: tokens that are proposed at once to follow its own, see `EngineSettings`; None for the
            engine's setting, which is also the limit.
        prediction: tokens that its output probably has, from which some are proposed; empty for none.
        adapter: of the model; None for the model alone.
    """

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    external_id: str = ""
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    client: str = ""
    deterministic: bool = False
    client_priority: int = 0
    max_draft_tokens: int | None = None
    prediction: list[int] = []
    adapter: AdapterRef | None = None


class SequenceUsage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the engine spent on one sequence; `server.engine.core.accounting` has the rules.

    Attributes:
        prefill_seconds: from its first step to its first token, or to its end if there was none.
        decode_seconds: from its first token to its end.
        num_steps: forward passes that computed tokens of the sequence.
        num_cached_prompt_tokens: prompt tokens taken from the prefix cache instead of being computed.
        num_computed_prompt_tokens: prompt tokens that were computed, each counted once. With the cached ones these are
            all tokens of the prompt, unless the sequence ended during its prefill.
        num_recomputed_tokens: tokens of prompt and output that were computed again, after a preemption.
        device_seconds: its share of the device time of its steps.
        block_seconds: blocks of the KV cache that it held, times seconds.
        num_draft_tokens: tokens that were proposed and computed.
        num_accepted_tokens: those of them that the model sampled too.
        num_predicted_tokens, num_accepted_predicted_tokens: those of both that are from the request's prediction.
    """

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_steps: int = 0
    num_cached_prompt_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_recomputed_tokens: int = 0
    device_seconds: float = 0.0
    block_seconds: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_predicted_tokens: int = 0
    num_accepted_predicted_tokens: int = 0


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One generated token of a request, or the end of the request.

    Attributes:
        token_id: None if the sequence ended without a new token (abort, error, timeout).
        logprob: natural logarithm of the token's probability under the unmodified logits; None unless requested.
        top_tokens: (token id, log-probability), most likely first.
        finish_reason: set only on the last event of a request.
        error: description of the error; set only with FinishReason.ERROR.
        usage: what the request used; set only on its last event, and only if that comes from the engine.
    """

    token_id: int | None
    logprob: float | None = None
    top_tokens: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    usage: SequenceUsage | None = None
