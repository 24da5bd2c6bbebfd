"""The records of TGI's replies and how their values are rendered.

Fields are in the order of the JSON. msgspec encodes the records, and the OpenAPI document is generated from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeGuard

import msgspec
from msgspec import UNSET, UnsetType

from model.sampling.parameters import SamplingDefaults
from model.text.tokens.end_token import EndToken
from server.engine.core.request import FinishReason
from server.http.metrics.usage import RequestUsage
from server.receipts.record import Receipt

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer
    from server.http.reply import completion

FINISH_REASONS = {
    FinishReason.EOS: "eos_token",
    FinishReason.STOP: "stop_sequence",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "timeout",
}
LOWEST_LOGPROB = -3.5e38
"""Just below the lowest float32. Only -inf and NaN, which JSON cannot represent, are not greater."""


class PromptToken(msgspec.Struct, frozen=True):
    """A token of the prompt. The first one has no log-probability."""

    id: int
    text: str
    logprob: float | None


class Token(msgspec.Struct, frozen=True):
    """A generated token; special tokens are not part of the generated text."""

    id: int
    text: str
    logprob: float | None
    special: bool


class BestOfSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One of the sequences that `best_of` did not choose."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PromptToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the generated sequence; `seed` is null if nothing was sampled."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PromptToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to /generate. `warnings` has a sentence for each accepted field without effect."""

    generated_text: str
    details: Details | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class StreamDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The details of a stream's last event."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int
    usage: RequestUsage


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream: a token. The fields from `generated_text` on have values only in the last event."""

    index: int
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None
    details: StreamDetails | None
    warnings: list[str] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class PromptSpan(msgspec.Struct, frozen=True):
    """A token of a text and the characters it covers, [start, stop)."""

    id: int
    text: str
    start: int
    stop: int


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every error response, and the last event of a stream that failed."""

    error: str
    error_type: str


class InfoReply(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is served, and the limits of a request."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    quantization: str
    model_device_type: str
    model_pipeline_tag: str
    model_use: Literal["chat", "completion"]
    chat_template: bool
    end_tokens: tuple[EndToken, ...]
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    max_body_bytes: int
    validation_workers: int
    max_client_batch_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    block_size: int
    num_blocks: int
    kv_cache_dtype: str
    sampling_defaults: SamplingDefaults
    num_engines: int
    num_engines_ready: int
    router: str
    version: str
    tessera_version: str
    sha: str | None
    docker_label: str | None


def render_token(token: completion.Token, tokenizer: Tokenizer) -> Token:
    """Render a generated token; the text of a special token is its name."""
    text = tokenizer.token_text(token.id) if token.special else token.text
    return Token(token.id, text, json_logprob(token.logprob), token.special)


def render_top_tokens(token: completion.Token, tokenizer: Tokenizer) -> list[Token]:
    """Render the most likely tokens at a token's position; empty if they were not requested."""
    return [
        Token(
            token_id,
            tokenizer.token_text(token_id),
            json_logprob(logprob),
            tokenizer.is_special(token_id),
        )
        for token_id, logprob in token.top_tokens
    ]


def json_logprob(value: float | None) -> float | None:
    """Round a log-probability to the 9 digits that float32 has; None if it is not finite."""
    return float(f"{value:.9g}") if is_json_logprob(value) else None


def is_json_logprob(value: float | None) -> TypeGuard[float]:
    """Return whether a log-probability can be written as a JSON number."""
    return value is not None and value > LOWEST_LOGPROB
