"""The asynchronous client of a running service: the methods of `Client`, as coroutines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import httpx2

from server.client import calls, transport
from server.client.address import DEFAULT_URL
from server.client.streams import AsyncStream

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from server.client.calls import Call, StreamCall
    from server.client.chat_records import ChatChunk, ChatReply
    from server.client.parameters import ChatParameters, GenerateParameters
    from server.client.records import GenerateReply, Health, PromptSpan, StreamEvent
    from server.engine.core.plan_report import PlanReport

AnswerT = TypeVar("AnswerT")


class AsyncClient:
    """Sends requests to a running service from an event loop; arguments, results and errors are those of `Client`.

    Cancelling a task that waits for an answer aborts its request. `close`, or leaving the `async with` block, closes
    the connections and aborts what is running.

    Args:
        base_url: of the service; the scheme may be absent, as in `gpu-host:8000`.
        api_key: sent as `Authorization: Bearer KEY`.
        timeout: seconds to wait for a connection, at most 10, and for each part of an answer; None for no limit.
        headers: sent with every request.

    Raises:
        ValueError: an argument is not valid.

    Example:
        >>> async def main() -> None:
        ...     async with AsyncClient("http://127.0.0.1:8000", timeout=60) as client:
        ...         replies = await asyncio.gather(
        ...             client.generate("def f(n):", max_new_tokens=9),
        ...             client.generate("def g(n):", max_new_tokens=2),
        ...         )
        ...         print([reply.generated_text for reply in replies])
        ...         async with await client.generate_stream("def f(n):", max_new_tokens=9) as stream:
        ...             async for event in stream:
        ...                 print(event.token.text, end="")
        >>> asyncio.run(main())
        [' return n', ' r']
         return n
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        options = transport.options(base_url, api_key, timeout, headers)
        with transport.reading_environment():
            self._http = httpx2.AsyncClient(**options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; requests that are running are aborted."""
        await self._http.aclose()

    async def generate(
        self,
        prompt: str,
        *,
        request_id: str | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> GenerateReply:
        """Continue a prompt; see `Client.generate`."""
        return await self._send(calls.generate(prompt, parameters), request_id)

    async def generate_stream(
        self,
        prompt: str,
        *,
        request_id: str | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> AsyncStream[StreamEvent]:
        """Continue a prompt, token by token; see `Client.generate_stream`."""
        return await self._open(calls.generate_stream(prompt, parameters), request_id)

    async def chat(
        self,
        messages: str | Iterable[Mapping[str, object]],
        *,
        request_id: str | None = None,
        extra_body: Mapping[str, object] | None = None,
        **parameters: Unpack[ChatParameters],
    ) -> ChatReply:
        """Answer a conversation; see `Client.chat`."""
        return await self._send(calls.chat(messages, parameters, extra_body), request_id)

    async def chat_stream(
        self,
        messages: str | Iterable[Mapping[str, object]],
        *,
        request_id: str | None = None,
        extra_body: Mapping[str, object] | None = None,
        **parameters: Unpack[ChatParameters],
    ) -> AsyncStream[ChatChunk]:
        """Answer a conversation, event by event; see `Client.chat_stream`."""
        return await self._open(calls.chat_stream(messages, parameters, extra_body), request_id)

    async def tokenize(self, text: str) -> list[PromptSpan]:
        """Return the tokens of a text as a prompt; see `Client.tokenize`."""
        return await self._send(calls.tokenize(text))

    async def plan(self) -> PlanReport:
        """Return which kernels the service runs, and why; see `Client.plan`."""
        return await self._send(calls.plan())

    async def health(self) -> Health:
        """Return whether the service takes requests; see `Client.health`."""
        return await self._send(calls.health())

    async def _send(self, call: Call[AnswerT], request_id: str | None = None) -> AnswerT:
        request = self._http.build_request(**transport.request(call, request_id))
        try:
            response = await self._http.send(request)
        except httpx2.RequestError as error:
            raise transport.connection_error(error, request.url, request_id) from error
        return call.read(response.status_code, response.headers, response.content)

    async def _open(
        self, call: StreamCall[AnswerT], request_id: str | None
    ) -> AsyncStream[AnswerT]:
        request: Any = self._http.build_request(**transport.request(call, request_id))
        try:
            response = await self._http.send(request, stream=True)
            if response.status_code not in call.statuses:
                call.read(response.status_code, response.headers, await response.aread())
        except httpx2.RequestError as error:
            raise transport.connection_error(error, request.url, request_id) from error
        return AsyncStream(response, call)
