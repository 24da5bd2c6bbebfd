"""The records of one message: the message before and after its tokens, and why it ended."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from server.engine.core.request import FinishReason
from server.http.dialects.anthropic.replies import (
    MessageDelta,
    MessageReply,
    MessageUsage,
    StopDelta,
)
from server.http.dialects.openai.replies import usage_of

if TYPE_CHECKING:
    from server.http.dialects.anthropic.replies import ContentBlock
    from server.http.reply.generation import Generation


class MessageFormat:
    """Builds the records of one message.

    Args:
        generation: the request's completion.
        model: the name of the model.
        max_tokens: the requested limit of tokens; 0 if the message has none, although one is generated.
        warnings: what has no effect.
    """

    def __init__(
        self, generation: Generation, model: str, max_tokens: int, warnings: tuple[str, ...]
    ) -> None:
        self._generation = generation
        self._completion = generation.completions[0]
        self._max_tokens = max_tokens
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._warnings = warnings

    @property
    def is_empty(self) -> bool:
        """Whether the client wants no content: the request only fills the prefix cache."""
        return self._max_tokens == 0

    def begun(self) -> MessageReply:
        """Build the message before its content; once the first token is there, so that the cached tokens are known."""
        return MessageReply(
            id=self._id,
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage(),
        )

    def finished(self, content: list[ContentBlock], num_calls: int = 0) -> MessageReply:
        """Build the message after its last token."""
        end = self.ended(num_calls)
        return msgspec.structs.replace(
            self.begun(),
            content=content,
            stop_reason=end.delta.stop_reason,
            stop_sequence=end.delta.stop_sequence,
            usage=end.usage,
            warnings=end.warnings,
            receipt=end.receipt,
        )

    def ended(self, num_calls: int) -> MessageDelta:
        """Build the event after the last block, of a message with a number of complete calls."""
        stop = self._completion.stop_reason
        sequence = stop if isinstance(stop, str) else None
        return MessageDelta(
            delta=StopDelta(self._stop_reason(num_calls, sequence), sequence),
            usage=self._usage(),
            warnings=(*self._warnings, *self._generation.warnings) or UNSET,
            receipt=self._generation.receipt,
        )

    def _stop_reason(self, num_calls: int, sequence: str | None) -> str:
        reason = self._completion.finish_reason
        if self.is_empty or reason is FinishReason.TIMEOUT:
            return "max_tokens"
        if reason is FinishReason.LENGTH:
            full = self._completion.num_tokens < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if num_calls else "end_turn"

    def _usage(self) -> MessageUsage:
        usage = usage_of(self._generation)
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=0 if self.is_empty else usage.completion_tokens,
            tessera=usage.tessera,
        )
