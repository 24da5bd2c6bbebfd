"""Reads a request body within limits of size and time, decodes it as JSON, and watches for the client to disconnect."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

import msgspec

from server.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    MalformedBodyError,
    MediaTypeError,
    ValidationError,
)
from server.http.body.eager import Begun
from server.http.request_id import current_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope

    from server.http.config import HTTPConfig
    from server.http.load.admission import Buffer

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DECODER = msgspec.json.Decoder()
_JSON = b"application/json"
_MOST_DIGITS = 19
MOST_PARTS = 1 << 16
"""Keys of all objects of a body, and its objects and arrays: to decode one takes up to half a microsecond, in which the
process answers nobody."""
_BEGINNING = 1 << 16
"""Bytes of a body that are decoded to find out how deep it is."""


class ClientDisconnectedError(Exception):
    """The client closed the connection, so no response can be sent."""


async def read_json(scope: Scope, receive: Receive, config: HTTPConfig, buffer: Buffer) -> object:
    """Read the body of a request and decode it.

    A declared length is reserved before the body is read; without one, bytes are counted as they arrive.

    The last of duplicate keys counts, as in nearly every JSON decoder. Integers keep their precision. NaN, Infinity,
    numbers outside a double's range, lone surrogates, invalid UTF-8 and nesting that exhausts the stack are rejected.

    Raises:
        MediaTypeError: the headers declare anything but uncompressed JSON in UTF-8.
        BodyTooLargeError: the body has more than `max_body_bytes`, by its declared length or as read.
        OverloadedError: the bodies of all requests together have too many bytes.
        BodyTimeoutError: it did not arrive within `body_timeout_seconds`.
        MalformedBodyError: it is not JSON, or nested too deeply.
        ValidationError: it has more than `MOST_PARTS` keys, or objects and arrays.
        ClientDisconnectedError: the client disconnected before the body was complete.
    """
    headers = dict(scope["headers"])
    _check_encoding(headers.get(b"content-encoding", b""))
    _check_media_type(headers.get(b"content-type", _JSON))
    buffer.hold(_check_length(headers.get(b"content-length"), config.max_body_bytes))
    reading = Begun(_read(receive, config.max_body_bytes, buffer))
    if reading.rest is None:
        body = reading.result
    else:
        try:
            async with asyncio.timeout(config.body_timeout_seconds):
                body = await reading.rest
        except TimeoutError:
            raise BodyTimeoutError(
                f"the request body did not arrive within {config.body_timeout_seconds:g} seconds"
            ) from None
    current_request().body_bytes = len(body)
    return decode(body)


def decode(body: bytes) -> object:
    """Decode JSON, which may have a byte order mark before it.

    Raises:
        MalformedBodyError: `body` is not JSON, or nested too deeply. The message says why without quoting the body.
        ValidationError: it has more than `MOST_PARTS` keys, or objects and arrays.
    """
    body = body.removeprefix(_BYTE_ORDER_MARK)
    _check_parts(body)
    try:
        return _DECODER.decode(body)
    except UnicodeDecodeError:
        raise MalformedBodyError("the request body is not valid UTF-8") from None
    except RecursionError:
        raise MalformedBodyError("the request body is nested too deeply") from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ").split(" - at ")[0]
        raise MalformedBodyError(f"the request body is not valid JSON: {reason}") from None


def _check_parts(body: bytes) -> None:
    """Check the numbers of keys, objects and arrays, without a loop over them."""
    if max(body.count(b":"), body.count(b"[") + body.count(b"{")) <= MOST_PARTS:
        return
    # Without escapes, a string is what is between two quotes.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(plain.split(b'"')[::2])
    keys, parts = outside.count(b":"), outside.count(b"[") + outside.count(b"{")
    for name, number in (("keys", keys), ("objects and arrays", parts)):
        if number > MOST_PARTS and not _is_too_deep(body[:_BEGINNING]):
            raise ValidationError(
                f"the request body must have at most {MOST_PARTS} {name}. Given: {number}"
            )


def _is_too_deep(beginning: bytes) -> bool:
    """Return whether the decoder refuses the beginning of a body for its depth, as it does as soon as it is reached."""
    try:
        _DECODER.decode(beginning)
    except RecursionError:
        return True
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # most beginnings are incomplete
    return False


def _check_encoding(declared: bytes) -> None:
    if declared and declared.decode("latin-1").strip().lower() not in ("", "identity"):
        raise MediaTypeError("the request body must not be compressed: leave out Content-Encoding")


def _check_media_type(declared: bytes) -> None:
    """Check that a content type is JSON in UTF-8."""
    if declared == _JSON:
        return
    parts = declared.decode("latin-1").split(";")
    media_type, *options = (part.strip().lower() for part in parts)
    kind, _, subtype = media_type.partition("/")
    if kind != "application" or (subtype != "json" and not subtype.endswith("+json")):
        raise MediaTypeError("the request body must be JSON: send Content-Type: application/json")
    charset = next((o.partition("=")[2].strip('"') for o in options if o.startswith("charset")), "")
    if charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise MediaTypeError("the request body must be encoded in UTF-8")


def _check_length(given: bytes | None, limit: int) -> int:
    """Return the declared length of a body; 0 if it is not declared."""
    if given is None:
        return 0
    declared = given.decode("latin-1")
    if not (declared.isascii() and declared.isdigit()):
        raise MalformedBodyError("Content-Length must be a number of bytes")
    if len(declared) > _MOST_DIGITS or (length := int(declared)) > limit:
        raise BodyTooLargeError(
            f"the request body must have at most {limit} bytes. Given: {declared[:_MOST_DIGITS]}"
        )
    return length


async def _read(receive: Receive, limit: int, buffer: Buffer) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLargeError(f"the request body must have at most {limit} bytes")
        buffer.hold(size)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


class ClientWatch:
    """Context manager that notices when the client closes its connection. Use after the body was read.

    Starlette cancels a stream when its client disconnects, but lets any other handler run to its end, while the engine
    would continue to compute. This class covers both cases.

    Args:
        receive: the ASGI server's `receive`.
        on_gone: called once, when the client has disconnected; None cancels the block, which then raises
            `ClientDisconnectedError`.

    Attributes:
        gone: whether the client has closed the connection.
        on_gone: may be replaced while the client is there.
    """

    __slots__ = ("_cancelled", "_cancelling", "_owner", "_receive", "_task", "gone", "on_gone")

    def __init__(self, receive: Receive, on_gone: Callable[[], None] | None = None) -> None:
        self.gone = False
        self.on_gone = on_gone
        self._receive = receive
        self._cancelled = False

    def __enter__(self) -> Self:
        owner = asyncio.current_task()
        assert owner is not None
        self._owner = owner
        self._cancelling = owner.cancelling()
        self._task = asyncio.get_running_loop().create_task(self._watch())
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._task.cancel()
        del self._task  # refers to this object by its coroutine
        # As `asyncio.timeout` does: the task continues unless somebody else has cancelled it too.
        if (
            self._cancelled
            and self._owner.uncancel() <= self._cancelling
            and kind is asyncio.CancelledError
        ):
            raise ClientDisconnectedError from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self.on_gone is not None:
            self.on_gone()
        else:
            self._cancelled = True
            self._owner.cancel()
