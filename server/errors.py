"""The errors that clients see, with their HTTP status and their `error_type`.

Independent of FastAPI and the engine. The HTTP layer renders an error as a reply or as the last event of a stream.

    TesseraError                              500  internal
    ├── ClientError                                the request must be changed
    │   ├── MalformedBodyError                400  malformed_body
    │   ├── UnauthorizedError                 401  unauthorized
    │   ├── ForbiddenError                    403  forbidden
    │   ├── NotFoundError                     404  not_found
    │   ├── UnknownModelError                 404  model_not_found
    │   ├── UnknownThreadError                404  thread_not_found
    │   ├── MethodNotAllowedError             405  method_not_allowed
    │   ├── BodyTimeoutError                  408  request_timeout
    │   ├── BodyTooLargeError                 413  body_too_large
    │   ├── MediaTypeError                    415  unsupported_media_type
    │   └── ValidationError                   422  validation
    │       └── PromptTooLongError            422  validation
    ├── CapacityError                              the same request may succeed later
    │   ├── OverloadedError                   429  overloaded
    │   └── UnavailableError                  503  unavailable
    │       └── StoppingError                 503  unavailable
    └── GenerationError                       424  generation
        ├── AbortedError                      499  aborted
        ├── DeadlineExceededError             504  timeout
        ├── IncompleteGenerationError         500  incomplete_generation
        └── IncompleteGenerationStreamError   500  incomplete_generation_stream
"""

from __future__ import annotations

from typing import ClassVar


class TesseraError(Exception):
    """Base class; raised itself only for a fault of the server.

    Attributes:
        status: HTTP status code.
        error_type: machine-readable name of the error.
        retry_after: seconds after which the client may retry; None if a retry cannot succeed.
        message: for the client; the class has the default.
    """

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"
    retry_after: int | None = None
    message: str = "Internal server error"

    def __init__(self, message: str | None = None) -> None:
        if message is not None:
            self.message = message
        super().__init__(self.message)


class ClientError(TesseraError):
    """The request is invalid."""

    status = 400


class MalformedBodyError(ClientError):
    """The body is not a single JSON object in UTF-8."""

    status = 400
    error_type = "malformed_body"


class UnauthorizedError(ClientError):
    """The request has no valid API key."""

    status = 401
    error_type = "unauthorized"
    message = "an API key is required: send `Authorization: Bearer KEY` or `X-API-Key: KEY`"


class ForbiddenError(ClientError):
    """The request is for another host, or from a page of another origin."""

    status = 403
    error_type = "forbidden"


class NotFoundError(ClientError):
    """The route does not exist."""

    status = 404
    error_type = "not_found"


class MethodNotAllowedError(ClientError):
    """The route does not support the method.

    Attributes:
        allowed: methods that the route supports.
    """

    status = 405
    error_type = "method_not_allowed"

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


class BodyTimeoutError(ClientError):
    """The body did not arrive in time."""

    status = 408
    error_type = "request_timeout"


class BodyTooLargeError(ClientError):
    """The body exceeds the size limit."""

    status = 413
    error_type = "body_too_large"


class MediaTypeError(ClientError):
    """The declared media type of the body is not plain JSON."""

    status = 415
    error_type = "unsupported_media_type"


class ValidationError(ClientError):
    """A field is missing, unknown, of the wrong type or out of range.

    The message states the field, its value and the limit. The first name in backquotes is the field.

    Attributes:
        reason: the message without TGI's prefix.
    """

    status = 422
    error_type = "validation"

    def __init__(self, message: str) -> None:
        super().__init__(f"Input validation error: {message}")
        self.reason = message


class PromptTooLongError(ValidationError):
    """The prompt has more tokens than fit.

    Attributes:
        given: tokens of the prompt; at least, if it was not tokenized.
        most: the limit.
    """

    def __init__(self, message: str, given: int, most: int) -> None:
        super().__init__(message)
        self.given = given
        self.most = most


class UnknownModelError(ClientError):
    """The request names a model that is not served."""

    status = 404
    error_type = "model_not_found"


class UnknownThreadError(ClientError):
    """The request continues a conversation that the server does not have; the client has to send all of it."""

    status = 404
    error_type = "thread_not_found"


class CapacityError(TesseraError):
    """The service cannot accept the request at the moment."""

    retry_after = 1


class OverloadedError(CapacityError):
    """A limit of requests in flight, or of the bytes of their bodies, is reached, or the request would wait too long.

    Args:
        message: says which limit.
        retry_after: seconds after which an equal request will probably be admitted.
    """

    status = 429
    error_type = "overloaded"

    def __init__(self, message: str = "Model is overloaded", retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(CapacityError):
    """The engine is starting, restarting or stopped; the message says which."""

    status = 503
    error_type = "unavailable"
    retry_after = 2


class StoppingError(UnavailableError):
    """The service is ending; another instance, or the next one, can serve the request."""

    message = "the server is stopping"


class GenerationError(TesseraError):
    """The engine ended the request with an error."""

    status = 424
    error_type = "generation"

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason and f"Request failed during generation: {reason}")


class AbortedError(GenerationError):
    """The request was aborted by its id.

    The status is the one that proxies log for requests that their clients gave up; client libraries do not retry it.
    """

    status = 499
    error_type = "aborted"
    message = "The request was aborted"


class DeadlineExceededError(GenerationError):
    """The deadline of the request passed before its first token."""

    status = 504
    error_type = "timeout"
    message = "`timeout_ms` passed before the generation was complete"


class IncompleteGenerationError(GenerationError):
    """The output of the engine ended without a finish reason."""

    status = 500
    error_type = "incomplete_generation"
    message = "Incomplete generation"


class IncompleteGenerationStreamError(GenerationError):
    """The output of the engine ended without a finish reason during a stream."""

    status = 500
    error_type = "incomplete_generation_stream"
    message = "Incomplete generation stream"
