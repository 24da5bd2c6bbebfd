"""The sampling parameters of a request and the sampler's result for one row, as plain records.

This module imports neither PyTorch nor NumPy, because the front end and the engine's scheduler import it.
"""

from __future__ import annotations

import math
import operator
import typing
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

NOT_FINITE = "the model's scores for this token are not finite numbers"
"""`SampledToken.error` of a row without a finite largest logit."""
NOTHING_ALLOWED = (
    "no token can be sampled: the grammar and the banned tokens allow none, or the model's scores of those that they "
    "allow are not finite numbers"
)
"""The same for a row with a mask."""

_FILTER = {"filter": True}
"""Metadata of parameters that keep some of the tokens."""


def no_token_error(mask: int) -> str:
    """Return the error of a row without a token, whose mask has this index; -1 for none."""
    return NOT_FINITE if mask < 0 else NOTHING_ALLOWED


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of a request that does not set them, which a checkpoint may have.

    Attributes:
        temperature: Divides the logits. 0 takes the most likely token (greedy).
        top_k: Sample from this number of most likely tokens.
        top_p: Sample from the most likely tokens that together have this probability.
        min_p: Sample from tokens at least this likely, relative to the most likely one.
        typical_p: Sample from the locally typical tokens that together have this probability.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens seen so far; 1 is off.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, extra=_FILTER)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1, extra=_FILTER)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1, extra=_FILTER)] = 0.0
    typical_p: Annotated[float, Meta(gt=0, le=1, extra=_FILTER)] = 1.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0


class SamplingParams(SamplingDefaults, frozen=True, kw_only=True, dict=True):
    """How the tokens of one request are chosen. Defaults and limits are already applied.

    Fields of request bodies, their checks and documents follow from the numbers with limits, here and in
    `SamplingDefaults`, and from their descriptions.

    The properties below determine whether a step may skip the sampler, and whether it may be launched before the tokens
    of the previous step are read. A parameter that changes logits, bans tokens or depends on earlier tokens must
    therefore be part of them. They are cached because every step reads them for every row.

    A temperature of 0 ignores the filters, but not the penalties. `top_k` also keeps all that tie with the last token,
    and 0 keeps all. The repetition penalty is for tokens in prompt and output.

    Attributes:
        frequency_penalty: Subtracted from a token's logit once for each time it was generated.
        presence_penalty: Subtracted once from the logit of every token that was generated.
        max_new_tokens: tokens, at least 1.
        min_new_tokens: tokens; end-of-sequence and stop ids are banned until this number has been generated.
        logit_bias: token id -> number added to its logit before everything else.
        bad_words: words as non-empty sequences of ids; the last id of a word is banned if prompt and output so far end
            with the other ids of the word.
        grammar: serialized llguidance grammar that the output follows; None for none.
        seed: unsigned 64-bit; with a token's position it alone determines the random number of that token.
        eos_token_ids: the end-of-sequence tokens of the model; empty when the request ignores them.
        stop_token_ids: further ids that end the sequence.
        logprobs: whether the log-probability of each token is reported; implied by `top_logprobs`.
        top_logprobs: most likely tokens reported at each position; 0 for none.
        prompt_logprobs: whether the log-probabilities of the prompt's tokens are reported; such a request takes
            no blocks from the prefix cache, since every position must be computed.
        prompt_top_logprobs: most likely tokens reported at each position of the prompt; only with `prompt_logprobs`.
    """

    top_k: Annotated[int, Meta(ge=0, extra=_FILTER)] = 0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    max_new_tokens: int
    min_new_tokens: int = 0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    prompt_top_logprobs: int = 0

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that end the sequence."""
        return self.eos_token_ids + self.stop_token_ids

    @cached_property
    def is_filtered(self) -> bool:
        """Whether only some of the tokens with a finite logit can be sampled."""
        return any(getattr(self, name) != neutral for name, neutral in FILTERS.items())

    @cached_property
    def inverse_temperature(self) -> float:
        """1 / temperature, bounded so that its product with any float32 difference, even infinity, is not NaN."""
        return min(max(1.0 / self.temperature, 1e-30), 1e30)

    @cached_property
    def min_p_distance(self) -> float:
        """Largest distance of a scaled logit from the largest one that `min_p` keeps."""
        return abs(math.log(self.min_p)) if self.min_p > 0.0 else math.inf

    @cached_property
    def kernel_columns(self) -> tuple[float, ...]:
        """The columns of a filtered row in the sampling kernels' table (`kernels.sampling.rows.SampleRow`)."""
        limits = self.top_k, self.top_p, self.min_p_distance, self.typical_p
        return self.inverse_temperature, *limits

    @cached_property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are reported with each token."""
        return self.logprobs or self.top_logprobs > 0

    @cached_property
    def bans_tokens(self) -> bool:
        """Whether `banned_ids` may return an id."""
        return bool(self.bad_words) or self.min_new_tokens > 0

    @cached_property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @cached_property
    def changes_logits(self) -> bool:
        """Whether logits are changed, other than by a mask, before they are divided by the temperature."""
        return self.has_penalties or bool(self.logit_bias)

    @cached_property
    def needs_history(self) -> bool:
        """Whether the host must know all earlier tokens before the next one can be sampled."""
        return (
            self.grammar is not None
            or self.has_penalties
            or max(map(len, self.bad_words), default=0) > 1
        )

    @cached_property
    def argmax_from(self) -> float:
        """Number of output tokens after which the sampler is no longer needed; infinity if it is always needed.

        From that token on, each token is the argmax of the unmodified logits, and no other tokens are reported.
        """
        if self.temperature != 0.0 or self.top_logprobs or self.bad_words or self.changes_logits:
            return math.inf
        return math.inf if self.grammar is not None else self.min_new_tokens

    @cached_property
    def skips_forced_tokens(self) -> bool:
        """Whether tokens that the grammar forces are appended without a step of their own.

        Their log-probabilities are then not computed, and `bad_words` would not apply to them.
        """
        return self.grammar is not None and not self.wants_logprobs and not self.bad_words

    def banned_ids(self, token_ids: Sequence[int], num_output_tokens: int) -> tuple[int, ...]:
        """Return the ids that cannot be the next token, apart from those that the grammar does not allow.

        The mask of a grammar also decides about end-of-sequence tokens, which must stay allowed where nothing else is.

        Args:
            token_ids: prompt and output; may lack the latest tokens unless `needs_history`.
            num_output_tokens: tokens generated so far, including those whose ids the host does not know yet.
        """
        banned: tuple[int, ...] = ()
        if num_output_tokens < self.min_new_tokens:
            banned = self.end_token_ids if self.grammar is None else self.stop_token_ids
        for *before, last in self.bad_words:
            if not before or list(token_ids[-len(before) :]) == before:
                banned += (last,)
        return banned


class Number(NamedTuple):
    """A sampling parameter that is a number.

    Attributes:
        type: float or int.
        limits: by "ge", "gt" and "le".
        neutral: the default, which has no effect.
        filter: metadata of a filter; None for other parameters.
    """

    type: type
    limits: dict[str, float]
    neutral: float
    filter: dict[str, bool] | None

    def allows(self, value: float) -> bool:
        """Return whether a value is finite and within the limits."""
        within = (getattr(operator, name)(value, limit) for name, limit in self.limits.items())
        return math.isfinite(value) and all(within)


def _number(field: msgspec.structs.FieldInfo) -> Number:
    meta = field.type.__metadata__[0]
    limits = {name: getattr(meta, name) for name in ("ge", "gt", "le")}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    return Number(field.type.__origin__, limits, field.default, meta.extra)


NUMBERS: Final[Mapping[str, Number]] = {
    field.name: _number(field)
    for field in msgspec.structs.fields(SamplingParams)
    if typing.get_origin(field.type) is Annotated
}
"""The sampling parameters that have limits, by name."""
FILTERS: Final[Mapping[str, float]] = {
    name: number.neutral for name, number in NUMBERS.items() if number.filter
}
"""Those that keep some of the tokens, and their values that keep all."""


class SampledToken(NamedTuple):
    """The sampler's result for one row.

    Attributes:
        token_id: the sampled token; None if `error` is set.
        logprob: natural logarithm of its probability under the unmodified logits; None if not requested.
        top: (token id, log-probability), most likely first, equals by smaller id.
        error: why this row has no token. Other rows of the batch are not affected.
    """

    token_id: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None
