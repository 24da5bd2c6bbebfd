"""Streams of events, as iterators that end the request when they are closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Self, TypeVar

import httpx2

from server.client.transport import connection_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from server.client.calls import StreamCall

EventT = TypeVar("EventT")


class Stream(Generic[EventT]):
    """The events of an answer, in order. Closing it, or leaving its `with` block, aborts the request.

    Attributes:
        request_id: what the log of the service calls the request, and `POST /abort` takes.

    Example:
        >>> with client.generate_stream("def f(n):", max_new_tokens=100) as stream:
        ...     for event in stream:
        ...         if event.index == 3:
        ...             break  # the service stops generating
        >>> event.token.text
        'e'
    """

    def __init__(self, response: httpx2.Response, call: StreamCall[EventT]) -> None:
        self.request_id: str | None = response.headers.get("x-request-id")
        self._response = response
        self._events = self._read(call)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> EventT:
        """Wait for the next event.

        Raises:
            ServiceStatusError: the stream ends with an error.
            ServiceConnectionError: the connection is lost, or an event cannot be read.
            ServiceTimeoutError: nothing arrived within the client's timeout.
        """
        return next(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection if the answer is not complete, which aborts the request."""
        self._events.close()
        self._response.close()

    def _read(self, call: StreamCall[EventT]) -> Generator[EventT]:
        headers = self._response.headers
        try:
            for data in self._response.iter_bytes():
                yield from call.feed(data, headers)
        except httpx2.RequestError as error:
            raise connection_error(error, self._response.url, self.request_id) from error
        finally:
            self._response.close()
        call.check_end(headers)


class AsyncStream(Generic[EventT]):
    """The events of an answer, in order. Closing it, or leaving its `async with` block, aborts the request.

    Attributes:
        request_id: what the log of the service calls the request, and `POST /abort` takes.

    Example:
        >>> async def main() -> None:
        ...     async with AsyncClient() as client:
        ...         async with await client.chat_stream("What does f return?", max_tokens=9) as stream:
        ...             print("".join([chunk.text async for chunk in stream]))
        >>> asyncio.run(main())
         return n
    """

    def __init__(self, response: httpx2.Response, call: StreamCall[EventT]) -> None:
        self.request_id: str | None = response.headers.get("x-request-id")
        self._response = response
        self._events = self._read(call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventT:
        """Wait for the next event; raises as `Stream.__next__`."""
        return await anext(self._events)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection if the answer is not complete, which aborts the request."""
        await self._events.aclose()
        await self._response.aclose()

    async def _read(self, call: StreamCall[EventT]) -> AsyncGenerator[EventT]:
        headers = self._response.headers
        try:
            async for data in self._response.aiter_bytes():
                for event in call.feed(data, headers):
                    yield event
        except httpx2.RequestError as error:
            raise connection_error(error, self._response.url, self.request_id) from error
        finally:
            await self._response.aclose()
        call.check_end(headers)
