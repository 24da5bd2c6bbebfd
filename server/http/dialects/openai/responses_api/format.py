"""The records of one response: the response before and after its tokens, its message, and its texts."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from server.engine.core.request import FinishReason
from server.http.dialects.openai.logprobs import TokenNames, chat_logprobs, generated
from server.http.dialects.openai.replies import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseReply,
    ResponseUsage,
    usage_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.text.tokenizer import Tokenizer
    from server.http.dialects.openai.options import Options
    from server.http.dialects.openai.replies import OutputItem, TokenLogprob
    from server.http.dialects.openai.schema import ResponseBody
    from server.http.reply.completion import Token
    from server.http.reply.generation import Generation


class ResponseFormat:
    """Builds the records of one response.

    Attributes:
        message_id: id of the output message.
        reports_logprobs: whether log-probabilities are reported.
    """

    def __init__(
        self, generation: Generation, options: Options, body: ResponseBody, tokenizer: Tokenizer
    ) -> None:
        self.message_id = new_message_id()
        self.reports_logprobs = options.logprobs.reported
        self._generation = generation
        self._names = TokenNames(tokenizer, as_ids=False)
        self._completion = generation.completions[0]
        format_ = None if body.text is None else body.text.format
        self._begun = ResponseReply(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            status="in_progress",
            incomplete_details=None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=options.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=options.sampling.temperature,
            text={
                "format": {"type": "text"}
                if format_ is None
                else format_.model_dump(by_alias=True, exclude_none=True)
            },
            tool_choice="auto" if body.tool_choice is None else body.tool_choice,
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=options.sampling.top_p,
            truncation=body.truncation or "disabled",
            usage=None,
        )

    @property
    def status(self) -> str:
        """The status after the last token."""
        full = self._completion.finish_reason is FinishReason.LENGTH
        return "incomplete" if full else "completed"

    def begun(self) -> ResponseReply:
        """Build the response before its first token."""
        return self._begun

    def finished(self, output: list[OutputItem], warnings: tuple[str, ...]) -> ResponseReply:
        """Build the response after its last token."""
        usage = usage_of(self._generation)
        full = self.status == "incomplete"
        return msgspec.structs.replace(
            self._begun,
            status=self.status,
            completed_at=None if full else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if full else None,
            output=output,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(),
                total_tokens=usage.total_tokens,
                tessera=usage.tessera,
            ),
            warnings=(*warnings, *self._generation.warnings) or UNSET,
            receipt=self._generation.receipt,
        )

    def text_item(self, text: str, tokens: Sequence[Token]) -> OutputMessage:
        """Build the finished message of a response without tools."""
        return OutputMessage(
            id=self.message_id, status=self.status, content=[self.part(text, tokens)]
        )

    def part(self, text: str, tokens: Sequence[Token]) -> OutputText:
        """Build the content of a message."""
        return OutputText(text=text, logprobs=self.logprobs(tokens))

    def logprobs(self, tokens: Sequence[Token]) -> list[TokenLogprob]:
        """Build the log-probabilities of tokens; empty if not requested."""
        return chat_logprobs(generated(tokens), self._names) if self.reports_logprobs else []


def new_message_id() -> str:
    """Return an id for an output message."""
    return f"msg_{uuid.uuid4().hex}"
