"""Checks that all dialects share: values against this server's limits, and a request's length against the context.

Every function raises `ValidationError`, whose message begins with the request's field, in backquotes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from server.errors import PromptTooLongError, ValidationError
from server.http.body.validation import describe, quote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from model.sampling.parameters import SamplingParams
    from server.engine.core.messages import EngineInfo
    from server.http.config import HTTPConfig

# Lower temperatures are greedy for every model, and dividing by them would overflow float32.
SMALLEST_TEMPERATURE = 1e-6
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 100


def check_temperature(temperature: float | None) -> None:
    """Check that a temperature is 0 or not too small."""
    if temperature is not None and 0 < temperature < SMALLEST_TEMPERATURE:
        raise ValidationError(
            f"`temperature` must be 0 (greedy) or >= {SMALLEST_TEMPERATURE}. "
            f"Given: {describe(temperature)}"
        )


def check_stop_strings(stop: Sequence[str], config: HTTPConfig, field: str = "stop") -> None:
    """Check the number of stop strings and their lengths."""
    if len(stop) > config.max_stop_sequences:
        raise ValidationError(
            f"`{field}` supports up to {config.max_stop_sequences} stop sequences. Given: {len(stop)}"
        )
    for i, text in enumerate(stop):
        if len(text) > config.max_stop_characters:
            raise ValidationError(
                f"`{field}.{i}` must have at most {config.max_stop_characters} characters. "
                f"Given: {len(text)}"
            )


def check_bad_words(words: Sequence[str]) -> None:
    """Check the lengths of banned words."""
    for i, word in enumerate(words):
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise ValidationError(
                f"`bad_words.{i}` must have at most {MAX_BAD_WORD_CHARACTERS} characters. "
                f"Given: {len(word)}"
            )


def check_stop_token_ids(token_ids: Sequence[int], config: HTTPConfig, info: EngineInfo) -> None:
    """Check the number of stop token ids, and that they are in the vocabulary."""
    if len(token_ids) > config.max_stop_token_ids:
        raise ValidationError(
            f"`stop_token_ids` supports up to {config.max_stop_token_ids} ids. "
            f"Given: {len(token_ids)}"
        )
    if token_ids and max(token_ids) >= info.vocab_size:
        raise ValidationError(
            f"`stop_token_ids` must be < {info.vocab_size}, the size of the vocabulary. "
            f"Given: {describe(max(token_ids))}"
        )


def logit_biases(biases: Mapping[str, float], info: EngineInfo) -> dict[int, float]:
    """Convert the keys of `logit_bias` to token ids."""
    converted: dict[int, float] = {}
    for key, bias in biases.items():
        is_number = key.isascii() and key.isdigit() and len(key) <= len(str(info.vocab_size))
        if not is_number or int(key) >= info.vocab_size:
            raise ValidationError(
                f"the keys of `logit_bias` must be token ids, 0 to {info.vocab_size - 1}. "
                f"Given: {quote('', key)}"
            )
        converted[int(key)] = float(bias)
    return converted


def longest_prompt(info: EngineInfo, truncate: int | None) -> int | None:
    """Return the limit of a prompt's tokens before it is truncated; None if any length is truncated to what fits."""
    return None if truncate is not None else info.max_total_tokens - 1


def check_prompt_length(length: int, field: str, info: EngineInfo) -> None:
    """Check that a prompt of `length` tokens leaves room for one more."""
    longest = info.max_total_tokens - 1
    if length > longest:
        raise PromptTooLongError(
            f"`{field}` must have at most {longest} tokens, one less than the "
            f"{info.max_total_tokens} that prompt and output share. Given: {length} tokens",
            length,
            longest,
        )


def with_output_limit(
    sampling: SamplingParams,
    wanted: int | None,
    prompt_length: int,
    info: EngineInfo,
    *,
    fields: tuple[str, str, str],
) -> SamplingParams:
    """Return sampling parameters whose `max_new_tokens` suits a prompt of `prompt_length` tokens.

    Args:
        sampling: the parameters.
        wanted: the requested `max_new_tokens`; None fills the context.
        prompt_length: tokens of the prompt.
        info: limits of the engine.
        fields: names of the request's fields for the prompt, the maximum and the minimum number of tokens.

    Raises:
        ValidationError: the prompt, or prompt and output together, exceed the limit.
    """
    prompt_field, most_field, least_field = fields
    check_prompt_length(prompt_length, prompt_field, info)
    available = info.max_total_tokens - prompt_length
    if wanted is None:
        wanted = available
    if wanted > available:
        raise ValidationError(
            f"`{prompt_field}` tokens + `{most_field}` must be <= {info.max_total_tokens}. Given: "
            f"{prompt_length} `{prompt_field}` tokens and {wanted} `{most_field}`"
        )
    if sampling.min_new_tokens > wanted:
        raise ValidationError(
            f"`{least_field}` must be <= {wanted}, the most that are generated here. "
            f"Given: {sampling.min_new_tokens}"
        )
    return msgspec.structs.replace(sampling, max_new_tokens=wanted)
