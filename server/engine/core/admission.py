"""Why the scheduler refuses a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.engine.core.sequence import Sequence


class AdmissionError(Exception):
    """A request that `Scheduler.add` refuses.

    AdmissionError
      CapacityError            more tokens than one sequence can ever have
      EmptyRequestError        no prompt, or nothing to generate
      DuplicateRequestError    its id is in use
    """


class CapacityError(AdmissionError):
    """A request that could never finish, however long it waited.

    Attributes:
        value: tokens the request may come to (prompt + max_new_tokens).
        limit: tokens that one sequence can have.
    """

    def __init__(self, value: int, limit: int) -> None:
        super().__init__(f"prompt and max_new_tokens come to {value} tokens; at most {limit} fit")
        self.value = value
        self.limit = limit


class EmptyRequestError(AdmissionError):
    """A request without a prompt token or without a token to generate."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(
            f"a request needs at least 1 prompt token and 1 new token; got "
            f"{sequence.num_prompt_tokens} and {sequence.sampling.max_new_tokens}"
        )


class DuplicateRequestError(AdmissionError):
    """A request whose id belongs to another one that is not finished."""

    def __init__(self, request_id: int) -> None:
        super().__init__(f"request id {request_id} is in use")
        self.request_id = request_id
