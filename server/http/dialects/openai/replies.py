"""The records of the OpenAI routes' replies and events.

Fields are in the order of the JSON. msgspec encodes the records, and the OpenAPI document is generated from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from server.http.metrics.usage import RequestUsage
from server.receipts.record import Receipt

if TYPE_CHECKING:
    from server.http.reply.generation import Generation


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Prompt tokens whose keys and values were in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Of a request with a `prediction`: tokens that were proposed, and are in the answer or not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of tokens. Each prompt counts once; every generated completion counts, also those not returned.

    `tessera` is an extension: what the request used; absent while it runs.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    tessera: RequestUsage | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a text's tokens; null for the first token of an echoed prompt.

    `text_offset` is where each token begins, in characters of the text. The tokens at a position have different names.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion. `stop_reason` is the stop string or stop token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to /v1/completions, and each event of its stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    warnings: tuple[str, ...] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token; `bytes` may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a message's tokens."""

    content: list[TokenLogprob]


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model calls; `arguments` is the text of a JSON object, or a piece of it in an event."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool."""

    id: str
    type: str = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message. `content` is null if it consists of calls.

    `function_call` is the call of a request with `functions`, which has no `tool_calls`.
    """

    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of a conversation. `stop_reason` is the stop string or stop token id that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: tuple[str, ...] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What an event adds to a call. `id`, `type` and the function's `name` are in the first event of a call only."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What an event adds to a message. `role` is only in the first event of a choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The choice that an event continues."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream of /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: tuple[str, ...] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Prompt tokens whose keys and values were in the prefix cache; writing them there is not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Output tokens that are not in the text: none."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    tessera: RequestUsage | UnsetType = UNSET


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    """The text of an output message."""

    type: str = "output_text"
    text: str
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The model's message. `status` is `in_progress`, `completed` or `incomplete`."""

    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText]


class FunctionCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """A call of a tool. `arguments` is the text of a JSON object; `call_id` names the call in its result.

    `status` is `in_progress`, `completed` or `incomplete`.
    """

    id: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET
    status: str


class CustomToolCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    """A call of a custom tool, with a text. `status` is `in_progress`, `completed` or `incomplete`."""

    id: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET
    status: str


OutputItem: TypeAlias = OutputMessage | FunctionCall | CustomToolCall


class ReasoningSettings(msgspec.Struct, frozen=True):
    """How the model reasons: not at all."""

    effort: None = None
    summary: None = None


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: str


class ResponseReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to /v1/responses."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    completed_at: int | None = None
    error: None = None
    incomplete_details: IncompleteDetails | None
    instructions: str | list[dict[str, Any]] | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningSettings = ReasoningSettings()
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    warnings: tuple[str, ...] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream of /v1/responses; which fields it has depends on `type`."""

    type: str
    sequence_number: int
    response: ResponseReply | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a text; `token_strs` are their names in the vocabulary, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(msgspec.Struct, frozen=True):
    """The text of tokens."""

    prompt: str


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A served model. `root` is the name of its checkpoint. From `type` on, as in Anthropic's API."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    type: str = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int
    max_tokens: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, once for each of its names. From `has_more` on, as in Anthropic's API."""

    object: str
    data: list[Model]
    has_more: bool = False
    first_id: str
    last_id: str


class OpenAIError(msgspec.Struct, frozen=True, kw_only=True):
    """An error; `param` is the field that it is about."""

    message: str
    type: str
    param: str | None
    code: int


class OpenAIErrorReply(msgspec.Struct, frozen=True):
    """The body of every error response, and the last event but one of a stream that failed."""

    error: OpenAIError


def usage_of(generation: Generation, *, unreported: int = 0) -> Usage:
    """Return the usage of a request so far."""
    generated = sum([c.num_tokens for c in generation.completions]) - unreported
    used = generation.usage() if generation.settled else UNSET
    details: CompletionTokensDetails | UnsetType = UNSET
    if generation.has_prediction and used is not UNSET:
        details = CompletionTokensDetails(*generation.predicted_tokens)
    return Usage(
        prompt_tokens=generation.prompt_tokens,
        completion_tokens=generated,
        total_tokens=generation.prompt_tokens + generated,
        prompt_tokens_details=PromptTokensDetails(generation.cached_tokens),
        completion_tokens_details=details,
        tessera=used,
    )
