"""The records of the Messages API's replies and events.

Fields are in the order of the JSON. msgspec encodes the records, and the OpenAPI document is generated from them.
"""

from __future__ import annotations

from typing import TypeAlias, get_args

import msgspec
from msgspec import UNSET, UnsetType

from server.http.metrics.usage import RequestUsage
from server.receipts.record import Receipt


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text of a message."""

    text: str


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool; `id` names it in its result. `input` is an object, empty where a stream begins it."""

    id: str
    name: str
    input: msgspec.Raw


ContentBlock: TypeAlias = TextBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of tokens. The prompt has `input_tokens` and `cache_read_input_tokens`, those from the prefix cache.

    `tessera` is an extension: what the request used; absent while it runs.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    tessera: RequestUsage | UnsetType = UNSET


class MessageReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The answer to /v1/messages. `stop_reason` is null where a stream begins it."""

    id: str
    role: str = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    warnings: tuple[str, ...] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    """The first event of a stream."""

    message: MessageReply


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """An event without meaning."""


class ContentBlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """A block begins; `index` is its place in the message."""

    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """What an event adds to a text."""

    text: str


class InputDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """What an event adds to the JSON of a call's input."""

    partial_json: str


class ContentBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | InputDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class StopDelta(msgspec.Struct, frozen=True):
    """Why a message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"
):
    """The message is complete."""

    delta: StopDelta
    usage: MessageUsage
    warnings: tuple[str, ...] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event of a stream."""


MessageEvent: TypeAlias = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)
EVENTS: tuple[type[msgspec.Struct], ...] = get_args(MessageEvent)


class TokenCount(msgspec.Struct, frozen=True):
    """The answer to /v1/messages/count_tokens."""

    input_tokens: int


class MessagesErrorDetails(msgspec.Struct, frozen=True):
    """What clients handle by themselves: they send the whole conversation after `thread_not_found`."""

    error_code: str


class MessagesError(msgspec.Struct, frozen=True):
    """An error."""

    type: str
    message: str
    details: MessagesErrorDetails | UnsetType = UNSET


class MessagesErrorReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The body of every error response, and the last event of a stream that failed."""

    error: MessagesError
    request_id: str
