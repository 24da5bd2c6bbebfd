"""Errors of requests that the scheduler refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.engine.core.sequence import Sequence


class AdmissionError(Exception):
    """`Scheduler.add` refuses a request.

    AdmissionError
      CapacityError            more tokens than a sequence can have
      EmptyRequestError        no prompt, or no token to generate
      DuplicateRequestError    the id is in use
    """


class CapacityError(AdmissionError):
    """A request is longer than the context or the KV cache, so it could never finish.

    Attributes:
        value: most tokens that the request may have (prompt + max_new_tokens).
        limit: most tokens that a sequence can have.
    """

    def __init__(self, value: int, limit: int) -> None:
        super().__init__(f"prompt and max_new_tokens come to {value} tokens; at most {limit} fit")
        self.value = value
        self.limit = limit


class EmptyRequestError(AdmissionError):
    """A request has no prompt token or no token to generate."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(
            f"a request needs at least 1 prompt token and 1 new token; got "
            f"{sequence.num_prompt_tokens} and {sequence.sampling.max_new_tokens}"
        )


class DuplicateRequestError(AdmissionError):
    """An unfinished request has the same id."""

    def __init__(self, request_id: int) -> None:
        super().__init__(f"request id {request_id} is in use")
        self.request_id = request_id
