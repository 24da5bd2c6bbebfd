"""The replies, field by field in wire order.

msgspec encodes them, and the OpenAPI document is made from them.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptToken(msgspec.Struct, frozen=True):
    """A token of the prompt. The first one has no log-probability."""

    id: int
    text: str
    logprob: float | None


class Token(msgspec.Struct, frozen=True):
    """A generated token; `special` ones are not part of the generated text."""

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
    """What is known about the generated sequence; `seed` is null where nothing was sampled."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PromptToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to /generate."""

    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The details of a stream's last event."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream: a token. Before the last, `generated_text` and `details` are null."""

    index: int
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None
    details: StreamDetails | None


class PromptSpan(msgspec.Struct, frozen=True):
    """A token of a text and the characters it covers, [start, stop)."""

    id: int
    text: str
    start: int
    stop: int


class ErrorReply(msgspec.Struct, frozen=True):
    """Every error, with any status, and the last event of a stream that broke."""

    error: str
    error_type: str


class HealthReply(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests are served; `error` and `error_type` are there where they are not."""

    state: str
    phase: str
    error: str | UnsetType = UNSET
    error_type: str | UnsetType = UNSET


class InfoReply(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is served, and the limits of a request."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    quantization: str
    model_device_type: str
    model_pipeline_tag: str
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
    block_size: int
    num_blocks: int
    kv_cache_dtype: str
    router: str
    version: str
    sha: str | None
    docker_label: str | None
