"""Renders errors as the Messages API does: with a type, a message and the request's id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from server.errors import (
    GenerationError,
    PromptTooLongError,
    TesseraError,
    UnavailableError,
    UnknownThreadError,
    ValidationError,
)
from server.http.dialects.anthropic.replies import (
    MessagesError,
    MessagesErrorDetails,
    MessagesErrorReply,
)
from server.http.request_id import current_request

if TYPE_CHECKING:
    from server.http.responses import ErrorBody

_OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


def status_of(error: type[TesseraError]) -> int:
    """Return the status of the response to an error. Anthropic's clients know neither 422 nor 424, and repeat 529."""
    if issubclass(error, ValidationError):
        return 400
    if issubclass(error, UnavailableError):
        return _OVERLOADED
    return 500 if error.status == GenerationError.status else error.status


def error_reply(error: TesseraError) -> MessagesErrorReply:
    """Render an error; also that of a stream."""
    status = status_of(type(error))
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 499 else "api_error")
    message = error.reason if isinstance(error, ValidationError) else error.message
    if isinstance(error, PromptTooLongError):
        # Claude Code recognizes an exceeded context by this sentence, and shortens the conversation.
        message = f"prompt is too long: {error.given} tokens > {error.most} maximum"
    lost = isinstance(error, UnknownThreadError)
    details = MessagesErrorDetails(error.error_type) if lost else UNSET
    return MessagesErrorReply(
        error=MessagesError(kind, message, details), request_id=current_request().id
    )


def render_error(error: TesseraError) -> ErrorBody:
    """Return the status and body of the response to an error."""
    return status_of(type(error)), error_reply(error)
