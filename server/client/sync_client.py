"""The synchronous client of a running service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import httpx2

from server.client import calls, transport
from server.client.address import DEFAULT_URL
from server.client.streams import Stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from server.client.calls import Call, StreamCall
    from server.client.chat_records import ChatChunk, ChatReply
    from server.client.parameters import ChatParameters, GenerateParameters
    from server.client.records import GenerateReply, Health, PromptSpan, StreamEvent
    from server.engine.core.plan_report import PlanReport

AnswerT = TypeVar("AnswerT")


class Client:
    """Sends requests to a running service; any number of threads may use it.

    It keeps connections open for later requests. `close`, or leaving its `with` block, closes them and aborts what is
    running. Nothing is sent again by itself; `ServiceError.retry_after` says when that is worth it.

    Args:
        base_url: of the service; the scheme may be absent, as in `gpu-host:8000`.
        api_key: sent as `Authorization: Bearer KEY`.
        timeout: seconds to wait for a connection, at most 10, and for each part of an answer; None for no limit. A
            text that is not streamed is one part. The parameter `timeout_ms` limits a whole request.
        headers: sent with every request.

    Raises:
        ValueError: an argument is not valid.

    Example:
        >>> with Client("http://127.0.0.1:8000", timeout=60) as client:
        ...     print(client.generate("def f(n):", max_new_tokens=9).generated_text)
        ...     with client.generate_stream("def f(n):", max_new_tokens=9) as stream:
        ...         print([event.token.text for event in stream][:3])
        ...     print(client.chat("What does f return?", max_tokens=9).text)
         return n
        [' ', 'r', 'e']
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
            self._http = httpx2.Client(**options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; requests that are running are aborted."""
        self._http.close()

    def generate(
        self,
        prompt: str,
        *,
        request_id: str | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> GenerateReply:
        """Continue a prompt: `POST /generate`.

        Args:
            prompt: to continue.
            request_id: what the log of the service calls the request; None lets the service choose.
            parameters: of the request; see `GenerateParameters`.

        Raises:
            ServiceStatusError: the service refuses the request, or fails.
            ServiceConnectionError: there is no service, or the connection is lost.
            ServiceTimeoutError: nothing arrived within the timeout.
            ValueError: a number is not finite, or a text has lone surrogates.

        Example:
            >>> client.generate("def f(n):", max_new_tokens=9, temperature=0).generated_text
            ' return n'
        """
        return self._send(calls.generate(prompt, parameters), request_id)

    def generate_stream(
        self,
        prompt: str,
        *,
        request_id: str | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> Stream[StreamEvent]:
        """Continue a prompt, token by token: `POST /generate_stream`.

        Args:
            prompt: to continue.
            request_id: what the log of the service calls the request; None lets the service choose.
            parameters: of the request; see `GenerateParameters`.

        Returns:
            The events, one for each token. Use it in a `with` statement, which aborts the request when it is left.

        Raises:
            ServiceError: as `generate`. Errors after the first token come from the stream.
            ValueError: as `generate`.

        Example:
            >>> with client.generate_stream("def f(n):", max_new_tokens=9) as stream:
            ...     for event in stream:
            ...         print(event.token.text, end="")
             return n
        """
        return self._open(calls.generate_stream(prompt, parameters), request_id)

    def chat(
        self,
        messages: str | Iterable[Mapping[str, object]],
        *,
        request_id: str | None = None,
        extra_body: Mapping[str, object] | None = None,
        **parameters: Unpack[ChatParameters],
    ) -> ChatReply:
        """Answer a conversation: `POST /v1/chat/completions`.

        Args:
            messages: each with `role` and `content`; a text is one message of the user.
            request_id: what the log of the service calls the request; None lets the service choose.
            extra_body: further fields of the request.
            parameters: of the request; see `ChatParameters`.

        Raises:
            ServiceError: as `generate`.
            ValueError: as `generate`, or `extra_body` has a field that is an argument too.

        Example:
            >>> conversation = [
            ...     {"role": "system", "content": "Be brief."},
            ...     {"role": "user", "content": "What does f return?"},
            ... ]
            >>> client.chat(conversation, max_tokens=9).text
            ' return n'
        """
        return self._send(calls.chat(messages, parameters, extra_body), request_id)

    def chat_stream(
        self,
        messages: str | Iterable[Mapping[str, object]],
        *,
        request_id: str | None = None,
        extra_body: Mapping[str, object] | None = None,
        **parameters: Unpack[ChatParameters],
    ) -> Stream[ChatChunk]:
        """Answer a conversation, event by event: `POST /v1/chat/completions` with `stream`.

        Args:
            messages: each with `role` and `content`; a text is one message of the user.
            request_id: what the log of the service calls the request; None lets the service choose.
            extra_body: further fields of the request.
            parameters: of the request; see `ChatParameters`.

        Returns:
            The events. Use it in a `with` statement, which aborts the request when it is left.

        Raises:
            ServiceError: as `generate`. Errors after the first event come from the stream.
            ValueError: as `chat`.

        Example:
            >>> with client.chat_stream("What does f return?", max_tokens=9) as stream:
            ...     for chunk in stream:
            ...         print(chunk.text, end="")
             return n
        """
        return self._open(calls.chat_stream(messages, parameters, extra_body), request_id)

    def tokenize(self, text: str) -> list[PromptSpan]:
        """Return the tokens of a text as a prompt: `POST /tokenize`.

        Raises:
            ServiceError: as `generate`.
            ValueError: the text has lone surrogates.

        Example:
            >>> len(client.tokenize("def f(n):"))
            9
        """
        return self._send(calls.tokenize(text))

    def plan(self) -> PlanReport:
        """Return which kernels the service runs, and why: `GET /plan`.

        Raises:
            ServiceError: as `generate`.

        Example:
            >>> plan = client.plan()
            >>> sorted({phase.phase for phase in plan.phases})
            ['decode', 'prefill']
        """
        return self._send(calls.plan())

    def health(self) -> Health:
        """Return whether the service takes requests: `GET /health`. One that does not yet is no error.

        Raises:
            ServiceStatusError: it is no service that answers.
            ServiceConnectionError: there is no service, or the connection is lost.
            ServiceTimeoutError: nothing arrived within the timeout.

        Example:
            >>> client.health().is_ready
            True
        """
        return self._send(calls.health())

    def _send(self, call: Call[AnswerT], request_id: str | None = None) -> AnswerT:
        request = self._http.build_request(**transport.request(call, request_id))
        try:
            response = self._http.send(request)
        except httpx2.RequestError as error:
            raise transport.connection_error(error, request.url, request_id) from error
        return call.read(response.status_code, response.headers, response.content)

    def _open(self, call: StreamCall[AnswerT], request_id: str | None) -> Stream[AnswerT]:
        request: Any = self._http.build_request(**transport.request(call, request_id))
        try:
            response = self._http.send(request, stream=True)
            if response.status_code not in call.statuses:
                call.read(response.status_code, response.headers, response.read())
        except httpx2.RequestError as error:
            raise transport.connection_error(error, request.url, request_id) from error
        return Stream(response, call)
