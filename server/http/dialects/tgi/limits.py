"""Turns a parsed request body into options: applies defaults, this server's limits and the rules between fields."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING

from model.sampling.parameters import FILTERS, SamplingDefaults, SamplingParams
from server.errors import ValidationError
from server.http.body.limits import (
    check_bad_words,
    check_stop_strings,
    check_stop_token_ids,
    check_temperature,
    with_output_limit,
)
from server.http.body.validation import describe
from server.http.dialects.tgi.schema import (
    GenerateBody,
    GenerateParameters,
    Grammar,
    JSONGrammar,
    RegexGrammar,
)
from server.http.text.structured_output import StructuredOutput

if TYPE_CHECKING:
    from server.engine.core.messages import EngineInfo
    from server.http.body.request_options import RequestOptions
    from server.http.config import HTTPConfig

# Without `parameters` tokens are sampled; inside the object `do_sample` defaults to false.
_NO_PARAMETERS = GenerateParameters(do_sample=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The options of a request. They are checked, except for the limits that depend on the prompt's length.

    Attributes:
        inputs: the prompt.
        sampling: sampling parameters; `with_prompt_length` replaces `max_new_tokens`, which is 1 before.
        max_new_tokens: the requested number; None fills the context.
        max_length: the requested number of tokens of prompt and output together; None for no such limit.
        best_of: sequences to generate.
        seed: the request's, or a random one; None if nothing is sampled.
        stop: strings that end the text.
        bad_words: words that must not be generated.
        grammar: what the text must follow; None for anything.
        truncate: tokens of the prompt to keep; None keeps all.
        return_full_text: whether the prompt comes before the generated text.
        details: whether tokens and finish reason are reported.
        prompt_details: whether the prompt's tokens are reported.
        request: how the engine schedules the request.
        warnings: a sentence for each accepted field without effect.
    """

    inputs: str
    sampling: SamplingParams
    max_new_tokens: int | None
    max_length: int | None
    best_of: int
    seed: int | None
    stop: tuple[str, ...]
    bad_words: tuple[str, ...]
    grammar: StructuredOutput | None
    truncate: int | None
    return_full_text: bool
    details: bool
    prompt_details: bool
    request: RequestOptions
    warnings: tuple[str, ...]

    def full_text(self, generated: str) -> str:
        """Return the text of the reply: the generated text, after the prompt if requested."""
        return self.inputs + generated if self.return_full_text else generated


def is_stream(body: GenerateBody, endpoint: str, stream: bool | None) -> bool:
    """Return whether the answer is a stream.

    Args:
        body: the request's body.
        endpoint: name of the route.
        stream: whether the route streams; None if the field `stream` decides.

    Raises:
        ValidationError: the field `stream` contradicts the route.
    """
    if stream is None:
        return bool(body.stream)
    if body.stream is not None and body.stream is not stream:
        other = "generate" if stream else "generate_stream"
        raise ValidationError(
            f"`stream` must be {str(stream).lower()} on /{endpoint}: use /{other}, or /. "
            f"Given: {str(body.stream).lower()}"
        )
    return stream


def check(
    body: GenerateBody,
    *,
    warnings: tuple[str, ...],
    streaming: bool,
    full_text: bool,
    config: HTTPConfig,
    info: EngineInfo,
) -> GenerateOptions:
    """Apply defaults, this server's limits and the rules between fields.

    Args:
        body: the request's body.
        warnings: a sentence for each accepted field without effect.
        streaming: whether the answer is a stream.
        full_text: default of `return_full_text`.
        config: limits of the HTTP layer.
        info: limits of the engine.

    Raises:
        ValidationError: a value is not allowed. The message names the field, its value and the limit.
    """
    parameters = body.parameters if body.parameters is not None else _NO_PARAMETERS
    _check_limits(parameters, config, info)
    sampled = _is_sampled(parameters)
    best_of = parameters.best_of or 1
    _check_best_of(parameters, best_of, streaming=streaming, sampled=sampled, config=config)
    if streaming and parameters.decoder_input_details:
        raise ValidationError(
            "`decoder_input_details` == true is not supported when streaming tokens"
        )
    seed = None
    if sampled:
        seed = parameters.seed if parameters.seed is not None else secrets.randbits(64)
    details = bool(parameters.details or parameters.decoder_input_details)
    return GenerateOptions(
        inputs=body.inputs,
        sampling=_sampling_params(
            parameters,
            seed=seed,
            logprobs=streaming or details or best_of > 1,
            config=config,
            info=info,
        ),
        max_new_tokens=parameters.max_new_tokens,
        max_length=parameters.max_length,
        best_of=best_of,
        seed=seed,
        stop=tuple(parameters.stop or ()),
        bad_words=tuple(parameters.bad_words or ()),
        grammar=_grammar(parameters.grammar),
        truncate=parameters.truncate,
        return_full_text=(
            full_text if parameters.return_full_text is None else parameters.return_full_text
        ),
        details=details,
        prompt_details=bool(parameters.decoder_input_details),
        request=parameters.request_options(info),
        warnings=warnings,
    )


def with_prompt_length(
    options: GenerateOptions, prompt_length: int, info: EngineInfo
) -> SamplingParams:
    """Return the sampling parameters with `max_new_tokens` set for a prompt of `prompt_length` tokens.

    Raises:
        ValidationError: the prompt, or prompt and output together, exceed the limit.
    """
    wanted = options.max_new_tokens
    if wanted is None and options.max_length is not None:
        wanted = min(options.max_length, info.max_total_tokens) - prompt_length
        if wanted < 1:
            raise ValidationError(
                f"`max_length` must be > {prompt_length}, the number of `inputs` tokens. "
                f"Given: {options.max_length}"
            )
    return with_output_limit(
        options.sampling,
        wanted,
        prompt_length,
        info,
        fields=("inputs", "max_new_tokens", "min_new_tokens"),
    )


def _is_sampled(p: GenerateParameters) -> bool:
    if p.temperature == 0:
        return False
    implied = {"temperature": SamplingDefaults().temperature, **FILTERS}
    return bool(p.do_sample) or any(
        getattr(p, name) not in (None, neutral) for name, neutral in implied.items()
    )


def _check_limits(p: GenerateParameters, config: HTTPConfig, info: EngineInfo) -> None:
    check_temperature(p.temperature)
    check_stop_strings(p.stop or (), config)
    check_bad_words(p.bad_words or ())
    check_stop_token_ids(p.stop_token_ids or (), config, info)
    if p.top_n_tokens is not None and p.top_n_tokens > config.max_top_n_tokens:
        raise ValidationError(
            f"`top_n_tokens` must be >= 0 and <= {config.max_top_n_tokens}. "
            f"Given: {describe(p.top_n_tokens)}"
        )
    longest = info.max_total_tokens - 1
    if p.truncate is not None and p.truncate > longest:
        raise ValidationError(
            f"`truncate` must be > 0 and <= {longest}. Given: {describe(p.truncate)}"
        )


def _check_best_of(
    p: GenerateParameters, best_of: int, *, streaming: bool, sampled: bool, config: HTTPConfig
) -> None:
    if best_of == 1:
        return
    if config.max_best_of == 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
    if best_of > config.max_best_of:
        raise ValidationError(
            f"`best_of` must be > 0 and <= {config.max_best_of}. Given: {describe(best_of)}"
        )
    if streaming:
        raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
    if not sampled:
        raise ValidationError("you must use sampling when `best_of` is > 1")
    if p.seed is not None:
        raise ValidationError("`seed` must not be set when `best_of` > 1")


def _sampling_params(
    p: GenerateParameters, *, seed: int | None, logprobs: bool, config: HTTPConfig, info: EngineInfo
) -> SamplingParams:
    greedy = {} if seed is not None else {"temperature": 0.0}
    return p.sampling_params(
        config,
        info,
        SamplingDefaults(),
        min_new_tokens=p.min_new_tokens or 0,
        seed=seed or 0,
        logprobs=logprobs,
        top_logprobs=(p.top_n_tokens or 0) if logprobs else 0,
        prompt_logprobs=bool(p.decoder_input_details),
        **greedy,
    )


def _grammar(grammar: Grammar | None) -> StructuredOutput | None:
    if grammar is None:
        return None
    if isinstance(grammar, RegexGrammar):
        return StructuredOutput("regex", grammar.value, "grammar.value")
    if isinstance(grammar, JSONGrammar):
        return StructuredOutput("json_schema", grammar.value, "grammar.value")
    return StructuredOutput("json_schema", grammar.value.schema_, "grammar.value.schema")
