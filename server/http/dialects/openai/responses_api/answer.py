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
from server.http.dialects.openai.schema import ChatBody, ResponseBody, SamplingFields

if TYPE_CHECKING:
    from server.engine.core.messages import EngineInfo
    from server.http.context import AppContext
    from server.http.dialects.openai.frames import TokenTexts
    from server.http.reply.generation import Generation
    from server.http.reply.streaming import StreamRenderer

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
        request, warnings = parse_body(ResponseBody, body, context.config)
        wants_logprobs = bool(request.include) or bool(request.top_logprobs)
        shared = {name: getattr(request, name) for name in SamplingFields.model_fields}
        messages = read_input(request)
        chat = ChatBody.model_construct(
            **shared,
            messages=messages,
            max_completion_tokens=request.max_output_tokens,
            logprobs=wants_logprobs,
            top_logprobs=request.top_logprobs,
            tools=request.tools,
            tool_choice=request.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls,
        )
        super().__init__(
            context, info, chat, messages, texts, warnings, constraint=find_constraint(request)
        )
        self._body = request

    def reply(self, generation: Generation) -> bytes:
        """Render the response."""
        reply = self._response(generation)
        completion = generation.returned[0]
        if self._tools is None:
            item = reply.text_item(completion.text, completion.tokens)
            return _encode(reply.finished([item], self.warnings))
        items = OutputItems(self._tools, reply)
        items.push(completion.text, completion.tokens, ended=True)
        return _encode(reply.finished(items.finished, self.warnings))

    def renderer(self, generation: Generation) -> StreamRenderer:
        """Make the renderer of the stream's events."""
        reply = self._response(generation)
        if self._tools is None:
            return TextEvents(reply, self.warnings, self._texts, self._context.tokenizer)
        return ToolEvents(reply, self.warnings, OutputItems(self._tools, reply))

    def _response(self, generation: Generation) -> ResponseFormat:
        return ResponseFormat(generation, self._options, self._body, self._context.tokenizer)
