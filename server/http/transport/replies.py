"""Responses to what is not served as a request: a few bytes that are rendered once."""

from __future__ import annotations

from http import HTTPStatus

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


def status_line(status: int) -> bytes:
    """Return the first line of a response."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def _reply(status: int, text: str, *fields: str) -> bytes:
    body = text.encode() + b"\n"
    head = [
        *fields,
        "Connection: close",
        "Content-Type: text/plain; charset=utf-8",
        f"Content-Length: {len(body)}",
    ]
    return status_line(status) + "\r\n".join([*head, "", ""]).encode() + body


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
MALFORMED = _reply(400, "Invalid HTTP request received.")
HEAD_TIMEOUT = _reply(408, "The head of the request took too long to arrive.")
URL_TOO_LONG = _reply(414, "The URL is too long.")
HEAD_TOO_LARGE = _reply(431, "The header fields, trailers or chunk extensions are too large.")
FAILED = _reply(500, "Internal Server Error")
TOO_MANY_CONNECTIONS = _reply(503, "Too many connections.", "Retry-After: 1")
