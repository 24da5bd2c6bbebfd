"""The errors of the client.

ServiceError
├── ServiceStatusError          the service refused the request or failed
└── ServiceConnectionError      no answer, or only a part of it, arrived
└── ServiceTimeoutError     within the timeout
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from server.errors import TesseraError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SHOWN_BYTES = 300


class ServiceError(Exception):
    """A request to a running service has no complete answer. Every error of the client is one.

    Attributes:
        message: says what is wrong, in the service's words where it gave some.
        status: HTTP status; that of the error's type if a stream ended with it; None if there was no answer.
        error_type: the service's name of the error, such as `validation` or `overloaded`; None if it has none.
        request_id: what the log of the service calls the request; None if it is not known.
        retry_after: seconds after which the same request may succeed; None if the service named none.

    Example:
        >>> try:
        ...     client.generate("def f(n):", temperature=-1)
        ... except ServiceError as error:
        ...     print(error.status, error.error_type, error.request_id is not None)
        422 validation True
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        error_type: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.error_type = error_type
        self.request_id = request_id
        self.retry_after = retry_after

    def __str__(self) -> str:
        """Return the message, with the status and the request id where they are known."""
        facts = (("status", self.status), ("request id", self.request_id))
        known = ", ".join(f"{name} {value}" for name, value in facts if value is not None)
        return f"{self.message} ({known})" if known else self.message


class ServiceStatusError(ServiceError):
    """The service answered with an error: it refused the request, or failed while it generated.

    Example:
        >>> try:
        ...     client.generate("def f(n):", max_new_tokens=0)
        ... except ServiceStatusError as error:
        ...     print(error.status)
        422
    """


class ServiceConnectionError(ServiceError):
    """There is no service at the address, the connection was lost, or what arrived is no answer of a service.

    Example:
        >>> try:
        ...     with Client("http://127.0.0.1:1") as nobody:
        ...         nobody.health()
        ... except ServiceConnectionError as error:
        ...     print(error.status)
        None
    """


class ServiceTimeoutError(ServiceConnectionError, TimeoutError):
    """No connection was made, or nothing arrived, within the client's timeout. The request is aborted.

    Example:
        >>> try:
        ...     with Client(timeout=0.001) as hasty:
        ...         hasty.generate("def f(n):", max_new_tokens=100)
        ... except ServiceTimeoutError as error:
        ...     print(isinstance(error, TimeoutError))
        True
    """


class ErrorBody(NamedTuple):
    """What the body of an error says.

    Attributes:
        message: for the user.
        error_type: name of the error; None if it has none.
        status: that the error says itself, or that errors of its type have; None if neither is known.
        is_known: whether the body has the form of an error.
    """

    message: str
    error_type: str | None
    status: int | None
    is_known: bool


def read_error(body: bytes) -> ErrorBody:
    """Read the body of an error, of any API; the message is its beginning if it has no known form."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    error_type: object = None
    code: object = None
    while isinstance(value, dict):
        error_type = value.get("error_type") or value.get("type") or error_type
        code = value.get("code", code)
        inner = (value[key] for key in ("error", "message", "detail") if key in value)
        value = next(inner, None)
    name = error_type if isinstance(error_type, str) else None
    status = code if isinstance(code, int) else _STATUS_OF_TYPE.get(name or "")
    is_known = isinstance(value, str)
    message = str(value) if is_known else body[:_SHOWN_BYTES].decode(errors="replace").strip()
    return ErrorBody(message, name, status, is_known)


def status_error(status: int, headers: Mapping[str, str], body: bytes) -> ServiceStatusError:
    """Return the error of a response.

    Args:
        status: of the response.
        headers: of the response, by name in any case.
        body: of the response.
    """
    read = read_error(body)
    return ServiceStatusError(
        read.message or "the answer has no text",
        status=status,
        error_type=read.error_type,
        request_id=headers.get("x-request-id"),
        retry_after=_seconds(headers.get("retry-after", "")),
    )


def stream_error(event: bytes, request_id: str | None) -> ServiceStatusError:
    """Return the error that an event of a stream reports."""
    read = read_error(event)
    return ServiceStatusError(
        read.message, status=read.status, error_type=read.error_type, request_id=request_id
    )


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:  # it may be a date
        return None
    return seconds if 0 <= seconds < math.inf else None


def _types(base: type[TesseraError]) -> Iterator[tuple[str, int]]:
    yield base.error_type, base.status
    for error in base.__subclasses__():
        yield from _types(error)


_STATUS_OF_TYPE = dict(_types(TesseraError))
