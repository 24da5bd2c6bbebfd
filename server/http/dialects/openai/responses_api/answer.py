"""Requests to /v1/responses: conversations as for chat, with a reply and typed events. Nothing is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from server.http.dialects.openai.chat import ChatAnswer
from server.http.dialects.openai.constraints import find_constraint
from server.http.dialects.openai.fields import parse_body
from server.http.dialects.openai.responses_api.format import ResponseFormat
from server.http.dialects.openai.responses_api.input import read_input
from server.http.dialects.openai.responses_api.items import OutputItems
from server.http.dialects.openai.responses_api.stream import TextEvents, ToolEvents
from server.http.dialects.openai.responses_api.tools import read_response_tools
from server.http.dialects.openai.schema import ChatBody, ResponseBody, SamplingFields

if TYPE_CHECKING:
    from typing import Any

    from server.engine.core.messages import EngineInfo
    from server.http.context import AppContext
    from server.http.dialects.openai.frames import TokenTexts
    from server.http.reply.generation import Generation
    from server.http.reply.streaming import StreamRenderer

_SYSTEM = ("system", "developer")
_LOGPROBS = "message.output_text.logprobs"
_encode = msgspec.json.Encoder().encode


class ResponseAnswer(ChatAnswer):
    """One request to /v1/responses; implements `server.http.exchange.Answer`.

    Raises:
        ValidationError: the body is not valid.
        UnknownModelError: it names a model that is not served.
    """

    _prompt_field = "input"
    _nested_tools = False
    _limit_fields = ("max_output_tokens", "max_output_tokens")

    def __init__(
        self, context: AppContext, info: EngineInfo, body: object, texts: TokenTexts
    ) -> None:
        request, warnings = parse_body(ResponseBody, body, context)
        include = request.include or ()
        wants_logprobs = _LOGPROBS in include or bool(request.top_logprobs)
        shared = {name: getattr(request, name) for name in SamplingFields.model_fields}
        messages, skipped = read_input(request, parts=context.reads_parts)
        tools = read_response_tools(request)
        if any(value != _LOGPROBS for value in include):
            warnings += (f"values of `include` other than {_LOGPROBS} have no effect",)
        chat = ChatBody.model_construct(
            **shared,
            messages=messages,
            max_completion_tokens=request.max_output_tokens,
            logprobs=wants_logprobs,
            top_logprobs=request.top_logprobs,
            tools=tools.functions,
            tool_choice=tools.choice,
            parallel_tool_calls=request.parallel_tool_calls,
        )
        self._tool_fields = tools.fields
        self._called = tools.called
        self._body = request
        super().__init__(
            context,
            info,
            chat,
            messages,
            texts,
            (*warnings, *skipped, *tools.warnings),
            constraint=find_constraint(request),
        )

    async def _encode(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> list[int]:
        """Tokenize the conversation; with `truncation` `auto`, without as many of its first turns as necessary."""
        if self._body.truncation != "auto":
            return await super()._encode(messages, tools)
        longest = self._info.max_total_tokens - (self._body.max_output_tokens or 1)
        roles = [message["role"] for message in messages]
        begin = next((i for i, role in enumerate(roles) if role not in _SYSTEM), len(roles))
        # Where a conversation may begin after its system messages, so that no result loses its call.
        begins = [begin, *(i for i in range(begin + 1, len(roles)) if roles[i] == "user")]
        low, middle, high = 0, 0, len(begins) - 1
        while True:
            kept = messages[:begin] + messages[begins[middle] :]
            token_ids = await super()._encode(kept, tools)
            if len(token_ids) <= longest:
                high = middle
            else:
                low = middle + 1
            if middle == high <= low:
                break
            middle = (low + high) // 2
        if dropped := begins[high] - begin:
            self.warnings += (f"`input`: the first {dropped} messages were dropped",)
        return token_ids

    def _most_tokens(self) -> int | None:
        return None if self._body.truncation == "auto" else super()._most_tokens()

    def reply(self, generation: Generation) -> bytes:
        """Render the response."""
        reply = self._response(generation)
        completion = generation.returned[0]
        if self._tools is None:
            item = reply.text_item(completion.text, completion.tokens)
            return _encode(reply.finished([item], self.warnings))
        items = OutputItems(self._tools, self._called, reply)
        items.push(completion, completion.text, completion.tokens)
        return _encode(reply.finished(items.finished, self.warnings))

    def renderer(self, generation: Generation) -> StreamRenderer:
        """Make the renderer of the stream's events."""
        reply = self._response(generation)
        if self._tools is None:
            return TextEvents(reply, self.warnings, self._texts, self._context.tokenizer)
        return ToolEvents(reply, self.warnings, OutputItems(self._tools, self._called, reply))

    def _response(self, generation: Generation) -> ResponseFormat:
        return ResponseFormat(generation, self._options, self._body, self._context.tokenizer)
