"""The request body of TGI's generate routes: types and fixed ranges, as the OpenAPI document shows them.

`limits` has this server's limits and the rules between fields.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from model.sampling.parameters import FILTERS
from server.http.body.field_types import ObjectOrText, optional
from server.http.body.sampling_fields import SMALLEST, CommonSamplingFields, number

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
INT32_MAX = 2**31 - 1
_FILTERED = ", ".join(
    f"`{name}` {'<' if neutral else '>'} {neutral:g}"
    for name, neutral in FILTERS.items()
    if name != "top_k"
)

_STRICT = ConfigDict(
    strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
)


class JSONGrammar(BaseModel):
    """A JSON schema that the text follows, as an object or as text."""

    model_config = _STRICT

    type: Literal["json"]
    value: ObjectOrText


class RegexGrammar(BaseModel):
    """A regular expression that matches the whole text."""

    model_config = _STRICT

    type: Literal["regex"]
    value: str


class NamedSchema(BaseModel):
    """A JSON schema with a name, which has no effect."""

    model_config = _STRICT

    name: str | None = None
    schema_: ObjectOrText = Field(alias="schema")


class JSONSchemaGrammar(BaseModel):
    """A JSON schema with a name."""

    model_config = _STRICT

    type: Literal["json_schema"]
    value: NamedSchema


Grammar = JSONGrammar | RegexGrammar | JSONSchemaGrammar


class GenerateParameters(CommonSamplingFields):
    """How to generate. Every field may be omitted or null, which means its default."""

    model_config = _STRICT

    best_of: Annotated[int, Field(ge=1)] | None = optional(
        "Number of sequences to generate; the one with the highest mean log-probability is "
        "returned. Requires sampling, excludes `seed`, is not available for streams."
    )
    temperature: Annotated[float | None, number("temperature", SMALLEST)] = None
    top_k: Annotated[int | None, number("top_k", ge=1, le=INT32_MAX)] = None
    do_sample: bool | None = optional(
        "Sample instead of taking the most likely token. Implied by `temperature` "
        f"other than 1 and 0, and by `top_k`, {_FILTERED}. Default: "
        "false; true if `parameters` is omitted."
    )
    max_new_tokens: Annotated[int, Field(ge=1, le=UINT32_MAX)] | None = optional(
        "Maximum number of tokens to generate. Default: until the model's context is full."
    )
    max_length: Annotated[int, Field(ge=1, le=UINT32_MAX)] | None = optional(
        "Maximum number of tokens of prompt and output together; `max_new_tokens` overrides it."
    )
    min_new_tokens: Annotated[int, Field(ge=0, le=UINT32_MAX)] | None = optional(
        "Minimum number of tokens to generate before an end-of-sequence token, stop token or "
        "stop string ends the text."
    )
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] | None = (
        optional("Strings that end the text; the matched one stays at its end.")
    )
    truncate: Annotated[int, Field(ge=1)] | None = optional(
        "Keep only this number of the prompt's last tokens."
    )
    return_full_text: bool | None = optional("Put the prompt before the generated text.")
    details: bool | None = optional("Return tokens, log-probabilities, seed and finish reason.")
    decoder_input_details: bool | None = optional(
        "Return the prompt's tokens and log-probabilities too; not for streams."
    )
    seed: Annotated[int, Field(ge=0, le=UINT64_MAX)] | None = optional(
        "Makes sampling repeatable. Default: a random seed, reported in `details`."
    )
    top_n_tokens: Annotated[int, Field(ge=0)] | None = optional(
        "Number of most likely tokens to return at each position, in `details`."
    )
    watermark: bool | None = optional("Accepted without effect; true causes a warning.")
    grammar: Annotated[Grammar, Field(discriminator="type")] | None = optional(
        "What the generated text must follow."
    )
    adapter_id: str | None = optional("Name of an adapter; `/v1/models` lists them. Default: none.")


class GenerateBody(BaseModel):
    """One prompt and how to continue it."""

    model_config = _STRICT

    inputs: Annotated[str, Field(min_length=1)] = Field(
        description="The prompt.", examples=["def fibonacci(n):"]
    )
    parameters: GenerateParameters | None = optional(
        "Omitted or null means sampling at temperature 1."
    )
    stream: bool | None = optional(
        "On `/`: answer with server-sent events. On the other routes it must agree with the route."
    )
