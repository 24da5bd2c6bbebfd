"""The answers of chat. The fields are those of the JSON of the OpenAI API, which docs/http.md describes."""

from __future__ import annotations

from typing import Any

import msgspec

from server.client.records import Usage


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model calls.

    Attributes:
        name: of the function; None in later events of a stream.
        arguments: the text of a JSON object, or in an event a part of it.

    Example:
        >>> CalledFunction(name="weather", arguments='{"city": "Rome"}').name
        'weather'
    """

    name: str | None = None
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool; `id` names it in the message with the result.

    Example:
        >>> call = ToolCall(id="call_1", function=CalledFunction(name="weather", arguments="{}"))
        >>> {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        {'role': 'tool', 'tool_call_id': 'call_1', 'content': 'sunny'}
    """

    id: str
    type: str = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message.

    Attributes:
        role: `assistant`.
        content: the text; None if the message consists of calls.
        refusal: always None.
        tool_calls: calls of the tools that the request offers.

    Example:
        >>> reply = client.chat("What does f return?", max_tokens=9)
        >>> reply.choices[0].message.content
        ' return n'
    """

    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a position; `bytes` may be a part of a character.

    Example:
        >>> TopLogprob(token="a", logprob=-0.5, bytes=(97,)).logprob
        -0.5
    """

    token: str
    logprob: float
    bytes: tuple[int, ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token, the natural logarithm of its probability, and the most likely tokens at its position.

    Example:
        >>> reply = client.chat("What does f return?", max_tokens=2, logprobs=True)
        >>> [token.token for token in reply.choices[0].logprobs.content]
        [' ', 'r']
    """

    token: str
    logprob: float
    bytes: tuple[int, ...] = ()
    top_logprobs: tuple[TopLogprob, ...] = ()


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a message's tokens.

    Example:
        >>> reply = client.chat("What does f return?", max_tokens=2, logprobs=True)
        >>> len(reply.choices[0].logprobs.content)
        2
    """

    content: tuple[TokenLogprob, ...]


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer.

    Attributes:
        index: of the answer, from 0.
        message: the answer.
        logprobs: of its tokens; only if the request asked for them.
        finish_reason: `stop`, `length`, `tool_calls` or `timeout`.
        stop_reason: the stop string or stop token id that ended it.

    Example:
        >>> reply = client.chat("What does f return?", max_tokens=9, n=2)
        >>> [(choice.index, choice.finish_reason) for choice in reply.choices]
        [(0, 'length'), (1, 'length')]
    """

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Prompt tokens whose keys and values were in the prefix cache.

    Example:
        >>> client.chat("What does f return?").usage.prompt_tokens_details.cached_tokens
        0
    """

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Of a conversation with a `prediction`: its tokens that were computed, and are in the answer or not.

    Example:
        >>> likely = {"type": "content", "content": " return n"}
        >>> reply = client.chat("What does f return?", prediction=likely)
        >>> reply.usage.completion_tokens_details is None
        False
    """

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class ChatUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of tokens; `tessera` is what the request used, None while it runs.

    Example:
        >>> usage = client.chat("What does f return?", max_tokens=9).usage
        >>> usage.completion_tokens, usage.total_tokens - usage.prompt_tokens
        (9, 9)
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails | None = None
    tessera: Usage | None = None


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a conversation.

    Attributes:
        id: of the answer.
        created: when, in seconds since 1970.
        model: the name of the model.
        choices: one, or as many as the request's `n`.
        usage: numbers of tokens.
        warnings: a sentence for each accepted field without effect.
        receipt: from which `tessera replay` computes it again, as the service wrote it; only if the
            request asked for it.

    Example:
        >>> client.chat("What does f return?", max_tokens=9).text
        ' return n'
    """

    id: str
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: ChatUsage
    warnings: tuple[str, ...] = ()
    receipt: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """Content of the first choice; empty if it consists of calls."""
        return (self.choices[0].message.content or "") if self.choices else ""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What an event adds to a call. `id` and the function's name are in the first event of a call only.

    Example:
        >>> ToolCallDelta(index=0, function=CalledFunction(arguments='{"city": ')).function.arguments
        '{"city": '
    """

    index: int
    id: str | None = None
    type: str | None = None
    function: CalledFunction = CalledFunction()


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What an event adds to a message. `role` is in the first event of a choice only.

    Example:
        >>> with client.chat_stream("What does f return?", max_tokens=9) as stream:
        ...     first = next(stream)
        >>> first.choices[0].delta.role
        'assistant'
    """

    role: str | None = None
    content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The choice that an event continues; `finish_reason` is in its last event.

    Example:
        >>> with client.chat_stream("What does f return?", max_tokens=9) as stream:
        ...     *_, last = stream
        >>> last.choices[0].finish_reason
        'length'
    """

    index: int
    delta: ChatDelta = ChatDelta()
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer.

    Attributes:
        id: of the answer.
        created: when, in seconds since 1970.
        model: the name of the model.
        choices: those that the event continues; none in the event with the usage.
        usage: numbers of tokens; only with `stream_options`.
        warnings: a sentence for each accepted field without effect; only in the last event.
        receipt: from which `tessera replay` computes the answer again, as the service wrote it; only in the last event,
            if the request asked for it.

    Example:
        >>> with client.chat_stream("What does f return?", max_tokens=9) as stream:
        ...     print("".join(chunk.text for chunk in stream))
         return n
    """

    id: str
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: ChatUsage | None = None
    warnings: tuple[str, ...] = ()
    receipt: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """What the event adds to the content of the first choice it continues."""
        return (self.choices[0].delta.content or "") if self.choices else ""
