"""Renders errors as the OpenAI API does: with message, type, param and code, and with status 400 instead of 422."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from server.errors import GenerationError, TesseraError, UnknownModelError, ValidationError
from server.http.dialects.openai.replies import OpenAIError, OpenAIErrorReply

if TYPE_CHECKING:
    from server.http.responses import ErrorBody

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    499: "RequestAbortedError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "DeadlineExceededError",
}
# The first name in backquotes is the field; see `ValidationError`.
_FIELD = re.compile(r"`([^`]+)`")


def status_of(error: type[TesseraError]) -> int:
    """Return the status of the response to an error. OpenAI's clients know neither 422 nor 424."""
    if issubclass(error, ValidationError):
        return 400
    return 500 if error.status == GenerationError.status else error.status


def error_reply(error: TesseraError) -> OpenAIErrorReply:
    """Render an error."""
    status = status_of(type(error))
    message, field = error.message, None
    if isinstance(error, ValidationError):
        message = error.reason
    if isinstance(error, ValidationError | UnknownModelError):
        field = _FIELD.search(message)
    return OpenAIErrorReply(
        OpenAIError(
            message=message,
            type=_TYPES.get(status, "APIError"),
            param=None if field is None else field[1],
            code=status,
        )
    )


def render_error(error: TesseraError) -> ErrorBody:
    """Return the status and body of the response to an error."""
    return status_of(type(error)), error_reply(error)
