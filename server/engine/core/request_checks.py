"""What the engine requires of a request, and the errors of requests that it refuses.

The front end has checked what a client may send. These checks protect the engine from a front end with a defect: on a
GPU, a token id outside the vocabulary would end the process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from model.sampling.parameters import NUMBERS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Collection

    from server.engine.core.request import GenerateRequest
    from server.engine.core.sequence import Sequence


class RefusedError(Exception):
    """The engine refuses a request.

    RefusedError
      InvalidRequestError      a value that no front end sends
      CapacityError            more tokens than a sequence can have
      EmptyRequestError        no prompt, or no token to generate
      DuplicateRequestError    the id is in use
    """


class InvalidRequestError(RefusedError):
    """A value of a request is outside its range."""


class CapacityError(RefusedError):
    """A request is longer than the context or the KV cache, so it could never finish.

    Attributes:
        value: most tokens that the request may have (prompt + max_new_tokens).
        limit: most tokens that a sequence can have.
    """

    def __init__(self, value: int, limit: int) -> None:
        super().__init__(f"prompt and max_new_tokens come to {value} tokens; at most {limit} fit")
        self.value = value
        self.limit = limit


class EmptyRequestError(RefusedError):
    """A request has no prompt token or no token to generate."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(
            f"a request needs at least 1 prompt token and 1 new token; got "
            f"{sequence.num_prompt_tokens} and {sequence.sampling.max_new_tokens}"
        )


class DuplicateRequestError(RefusedError):
    """An unfinished request has the same id."""

    def __init__(self, request_id: int) -> None:
        super().__init__(f"request id {request_id} is in use")
        self.request_id = request_id


def check_request(request: GenerateRequest, vocab_size: int) -> None:
    """Check the values on which a step would fail.

    Args:
        request: as it was decoded; its types are right.
        vocab_size: of the model.

    Raises:
        InvalidRequestError: a value is outside its range; the message names the value and the range.
    """
    _check_ids("prompt_token_ids", request.prompt_token_ids, vocab_size)
    _check_ids("prediction", request.prediction, vocab_size)
    if request.deadline is not None and math.isnan(request.deadline):
        raise InvalidRequestError("the deadline is not a number")
    sampling = request.sampling
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    for word in sampling.bad_words:
        if not word:
            raise InvalidRequestError("a word of bad_words has no token")
        _check_ids("bad_words", word, vocab_size)
    _check_numbers(sampling, vocab_size)


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        value = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequestError(f"{name}: {value} is not a token id from 0 to {vocab_size - 1}")


def _check_numbers(sampling: SamplingParams, vocab_size: int) -> None:
    counts = sampling.top_logprobs, sampling.prompt_top_logprobs
    if all(0 <= count <= vocab_size for count in counts) and all(
        number.allows(getattr(sampling, name)) for name, number in NUMBERS.items()
    ):
        return
    names = (*NUMBERS, "top_logprobs", "prompt_top_logprobs")
    values = ", ".join(f"{name} {getattr(sampling, name)!r}" for name in names)
    raise InvalidRequestError(
        f"a number is outside its range, or there are more likely tokens than {vocab_size}: {values}"
    )
