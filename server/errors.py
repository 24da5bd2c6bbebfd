"""Every error a client can be shown, with its HTTP status and its `error_type` on the wire.

Knows neither FastAPI nor the engine: the HTTP layer turns these into replies, or into the last
event of a stream.

    TesseraError                              500  internal
    ├── ClientError                                the request has to change
    │   ├── MalformedBodyError                400  malformed_body
    │   ├── NotFoundError                     404  not_found
    │   ├── MethodNotAllowedError             405  method_not_allowed
    │   ├── BodyTimeoutError                  408  request_timeout
    │   ├── BodyTooLargeError                 413  body_too_large
    │   ├── MediaTypeError                    415  unsupported_media_type
    │   └── ValidationError                   422  validation
    ├── CapacityError                              the same request may succeed later
    │   ├── OverloadedError                   429  overloaded
    │   └── UnavailableError                  503  unavailable
    └── GenerationError                       424  generation
        ├── IncompleteGenerationError         500  incomplete_generation
        └── IncompleteGenerationStreamError   500  incomplete_generation_stream
"""

from __future__ import annotations

from typing import ClassVar


class TesseraError(Exception):
    """The root; shown as such only where something of ours is broken.

    Attributes:
        status: HTTP status code.
        error_type: the machine-readable name clients switch on.
        retry_after: seconds after which the client may try again; None where that cannot help.
    """

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"
    retry_after: int | None = None

    def __init__(self, message: str = "Internal server error") -> None:
        super().__init__(message)
        self.message = message


class ClientError(TesseraError):
    """The request cannot be served as it is."""

    status = 400


class MalformedBodyError(ClientError):
    """The body is not one JSON object in UTF-8."""

    status = 400
    error_type = "malformed_body"


class NotFoundError(ClientError):
    """There is no such route."""

    status = 404
    error_type = "not_found"


class MethodNotAllowedError(ClientError):
    """The route exists, for other methods.

    Attributes:
        allowed: the methods it exists for.
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
    """The body is larger than the server reads."""

    status = 413
    error_type = "body_too_large"


class MediaTypeError(ClientError):
    """The body is declared to be something other than plain JSON."""

    status = 415
    error_type = "unsupported_media_type"


class ValidationError(ClientError):
    """A field is missing, unknown, of the wrong type or out of range.

    The message names the field, its value and the limit.
    """

    status = 422
    error_type = "validation"

    def __init__(self, message: str) -> None:
        super().__init__(f"Input validation error: {message}")


class CapacityError(TesseraError):
    """The service cannot take the request now."""

    retry_after = 1


class OverloadedError(CapacityError):
    """As many requests as the service admits are already in flight."""

    status = 429
    error_type = "overloaded"

    def __init__(self, message: str = "Model is overloaded") -> None:
        super().__init__(message)


class UnavailableError(CapacityError):
    """The engine is starting, being restarted, or gone; the message says which."""

    status = 503
    error_type = "unavailable"
    retry_after = 2


class GenerationError(TesseraError):
    """The engine gave up on this request."""

    status = 424
    error_type = "generation"

    def __init__(self, reason: str) -> None:
        super().__init__(f"Request failed during generation: {reason}")


class IncompleteGenerationError(GenerationError):
    """The engine's answer broke off without saying why."""

    status = 500
    error_type = "incomplete_generation"

    def __init__(self) -> None:
        TesseraError.__init__(self, "Incomplete generation")


class IncompleteGenerationStreamError(GenerationError):
    """The same, found while streaming."""

    status = 500
    error_type = "incomplete_generation_stream"

    def __init__(self) -> None:
        TesseraError.__init__(self, "Incomplete generation stream")
