"""Turns a parsed body into options: applies defaults, this server's limits and the rules between fields."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import secrets
from typing import TYPE_CHECKING

import msgspec

from model.sampling.parameters import SamplingParams
from server.errors import ValidationError
from server.http.body.limits import (
    check_bad_words,
    check_prompt_length,
    check_stop_strings,
    check_stop_token_ids,
    check_temperature,
    with_output_limit,
)
from server.http.body.validation import describe
from server.http.context import AppContext, check_vocabulary
from server.http.dialects.openai.constraints import find_constraint
from server.http.dialects.openai.fields import reply_model
from server.http.reply.completion import Prompt, StopStrings
from server.http.reply.generation import Generation
from server.http.text.structured_output import StructuredOutput, compile_grammar
from server.version import version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.engine.core.messages import EngineInfo
    from server.http.body.request_options import RequestOptions
    from server.http.config import HTTPConfig
    from server.http.dialects.openai.schema import SamplingFields, TextFields

_UINT64_MASK = 2**64 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """The log-probabilities that a request asks for.

    Attributes:
        reported: whether the reply has them.
        top: most likely tokens at each position.
        prompt: whether the prompt's tokens have them too.
    """

    reported: bool = False
    top: int = 0
    prompt: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimit:
    """The limit of generated tokens, and the fields it came from.

    Attributes:
        wanted: the requested number; None means the default.
        default: None fills the context; a number is reduced to what fits.
        prompt_field: the field with the prompt, for error messages.
        field: the field with the number, for error messages.
    """

    wanted: int | None
    default: int | None
    prompt_field: str
    field: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a request. They are checked, except for the limits that depend on the prompt's length.

    Attributes:
        model: the name of the model in the reply.
        fingerprint: of the service and its settings that affect the text, in the reply.
        sampling: sampling parameters; `submit` replaces `max_new_tokens`, which is 1 before, and the grammar.
        seeded: whether the seed is the request's. If not, each prompt gets a random one.
        completions: sequences to generate for each prompt.
        n: how many of these are returned.
        stop: strings that end the text.
        bad_words: words that must not be generated.
        constraint: on the text; None for none.
        request: how the engine schedules the request.
        skip_special_tokens: whether special tokens add no text.
        truncate: tokens of the prompt to keep; -1 keeps as many as fit, None keeps all.
        logprobs: the log-probabilities in the reply.
        tokens_as_ids: whether these name tokens by their ids.
        token_ids: whether the reply has the ids of the tokens.
        usage_event: whether a stream ends with an event for the usage.
        running_usage: whether every event of a stream has the usage so far.
    """

    model: str
    fingerprint: str
    sampling: SamplingParams
    seeded: bool
    completions: int
    n: int
    stop: StopStrings
    bad_words: tuple[str, ...]
    constraint: StructuredOutput | None
    request: RequestOptions
    skip_special_tokens: bool
    truncate: int | None
    logprobs: Logprobs
    tokens_as_ids: bool
    token_ids: bool
    usage_event: bool
    running_usage: bool


def check(
    body: TextFields,
    *,
    logprobs: Logprobs,
    best_of: int | None = None,
    constraint: StructuredOutput | None = None,
    config: HTTPConfig,
    info: EngineInfo,
) -> Options:
    """Apply defaults, this server's limits and the rules between the fields that all bodies have.

    Args:
        body: the request's body.
        logprobs: the log-probabilities that the body asks for.
        best_of: sequences to generate for each prompt; None means as many as are returned.
        constraint: on the text; None for the one that the body states.
        config: limits of the HTTP layer.
        info: limits of the engine.

    Raises:
        ValidationError: a value is not allowed. The message names the field, its value and the limit.
    """
    check_temperature(body.temperature)
    check_stop_strings(body.stop or (), config)
    check_stop_token_ids(body.stop_token_ids or (), config, info)
    check_bad_words(body.bad_words or ())
    n = body.n or 1
    completions = best_of or n
    if completions < n:
        raise ValidationError(f"`best_of` must be >= `n`. Given: {completions} and {n}")
    if body.stream and completions > n:
        raise ValidationError("`best_of` must equal `n` when streaming tokens")
    events = body.stream_options
    if events is not None and not body.stream:
        raise ValidationError("`stream_options` is only allowed if `stream` is true")
    return Options(
        model=reply_model(body.model, config),
        fingerprint=_fingerprint(
            info.model_id, info.device, info.dtype, info.quantization, info.kv_cache_dtype
        ),
        sampling=_sampling_params(body, logprobs, ranked=completions > n, config=config, info=info),
        seeded=body.seed is not None,
        completions=completions,
        n=n,
        stop=StopStrings(tuple(body.stop or ()), included=bool(body.include_stop_str_in_output)),
        bad_words=tuple(body.bad_words or ()),
        constraint=constraint or find_constraint(body),
        request=body.request_options(info),
        skip_special_tokens=body.skip_special_tokens is not False,
        truncate=body.truncate_prompt_tokens,
        logprobs=logprobs,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        token_ids=bool(body.return_token_ids),
        usage_event=bool(events and events.include_usage),
        running_usage=bool(
            events and events.continuous_usage_stats and events.include_usage is not False
        ),
    )


async def submit(
    context: AppContext,
    info: EngineInfo,
    options: Options,
    prompts: Sequence[list[int]],
    limit: OutputLimit,
) -> Generation:
    """Submit the prompts of a request to the engine.

    Raises:
        ValidationError: a prompt is too long or has unknown tokens, or the constraint cannot be compiled.
        UnavailableError: the engine is not ready.
    """
    sampling = options.sampling
    if options.bad_words:
        bad_words = await context.encode_words(options.bad_words, "bad_words")
        sampling = msgspec.structs.replace(sampling, bad_words=bad_words)
    constraint = None
    if options.constraint is not None:
        constraint = await compile_grammar(context, options.constraint)
        sampling = msgspec.structs.replace(sampling, grammar=constraint.grammar)
    made = []
    for token_ids in prompts:
        check_vocabulary(token_ids, limit.prompt_field, info)
        kept = _truncated(token_ids, options.truncate, limit, info)
        limited = _limited(sampling, len(kept), limit, info)
        if not options.seeded:
            limited = msgspec.structs.replace(limited, seed=secrets.randbits(64))
        made.append(Prompt(kept, limited))
    return Generation(
        context,
        made,
        completions_per_prompt=options.completions,
        stop=options.stop,
        keep_tokens=options.logprobs.reported or options.token_ids,
        options=options.request,
        skip_special_tokens=options.skip_special_tokens,
        constraint=constraint,
    )


def _truncated(
    token_ids: list[int], truncate: int | None, limit: OutputLimit, info: EngineInfo
) -> list[int]:
    if truncate is None:
        return token_ids
    longest = info.max_total_tokens - 1
    if truncate > longest or truncate == 0:
        raise ValidationError(
            f"`truncate_prompt_tokens` must be -1, or > 0 and <= {longest}. "
            f"Given: {describe(truncate)}"
        )
    if truncate == -1:
        truncate = max(1, info.max_total_tokens - (limit.wanted or limit.default or 1))
    return token_ids[-truncate:]


def _limited(
    sampling: SamplingParams, prompt_length: int, limit: OutputLimit, info: EngineInfo
) -> SamplingParams:
    """Return sampling parameters whose `max_new_tokens` suits a prompt of `prompt_length` tokens."""
    wanted = limit.wanted
    if wanted is None and limit.default is not None:
        check_prompt_length(prompt_length, limit.prompt_field, info)
        wanted = min(limit.default, info.max_total_tokens - prompt_length)
    fields = (limit.prompt_field, limit.field, "min_tokens")
    return with_output_limit(sampling, wanted, prompt_length, info, fields=fields)


@functools.cache
def _fingerprint(*facts: str) -> str:
    """Return an identifier that is the same for every request to services of equal version and settings."""
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()
    return f"tessera-{version()}-{digest[:10]}"


def _sampling_params(
    body: SamplingFields, logprobs: Logprobs, *, ranked: bool, config: HTTPConfig, info: EngineInfo
) -> SamplingParams:
    return body.sampling_params(
        config,
        info,
        config.sampling_defaults,
        min_new_tokens=body.min_tokens or 0,
        seed=(body.seed or 0) & _UINT64_MASK,
        logprobs=logprobs.reported or ranked,
        top_logprobs=min(logprobs.top, info.vocab_size),
        prompt_logprobs=logprobs.prompt,
        prompt_top_logprobs=min(logprobs.top, info.vocab_size) if logprobs.prompt else 0,
    )
