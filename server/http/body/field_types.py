"""Types of request fields that several dialects have."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError, PydanticKnownError

from server.http.body.limits import MAX_BAD_WORDS, MAX_LOGIT_BIASES


def optional(description: str) -> Any:  # noqa: ANN401 - as pydantic's `Field`
    """Describe a field that may be left out or null, which means its default."""
    return Field(None, description=description)


def _limit_biases(value: object) -> object:
    """Reject too many entries before pydantic checks each of them."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        context = {
            "field_type": "Dictionary",
            "max_length": MAX_LOGIT_BIASES,
            "actual_length": len(value),
        }
        raise PydanticKnownError("too_long", context)
    return value


def _check_object_or_text(value: object) -> object:
    if isinstance(value, dict | str):
        return value
    raise PydanticCustomError(
        "object_or_text", "must be {expected}", {"expected": "an object or a string"}
    )


ObjectOrText = Annotated[
    Any,
    BeforeValidator(_check_object_or_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
"""A JSON object or a string. A union would report an error for each of its types."""


_NAME = {"type": "string", "minLength": 1}
_STRUCTURE = {
    "type": "object",
    "required": ["begin"],
    "properties": {
        "begin": _NAME,
        "schema": {"type": ["object", "boolean", "string"]},
        "end": {"type": "string"},
    },
    "additionalProperties": False,
}
_TAG_FORMAT = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string"}},
}
TagFormat = Annotated[dict[str, Any], WithJsonSchema(_TAG_FORMAT)]
StructuralTag = Annotated[
    Any,
    BeforeValidator(_check_object_or_text),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "required": ["format"],
                    "properties": {"type": {}, "format": _TAG_FORMAT},
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "required": ["structures", "triggers"],
                    "properties": {
                        "type": {},
                        "structures": {"type": "array", "minItems": 1, "items": _STRUCTURE},
                        "triggers": {"type": "array", "minItems": 1, "items": _NAME},
                    },
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
"""Structures that may follow their triggers in free text, or a format: an object or JSON; `model.sampling.grammar`
checks it."""


def _check_false(value: bool) -> bool:
    if value:
        raise PydanticCustomError("only_false", "must be {expected}", {"expected": "false"})
    return value


OnlyFalse = Annotated[
    bool, AfterValidator(_check_false), WithJsonSchema({"type": "boolean", "const": False})
]
"""False. Unlike `Literal[False]`, it does not take 0 for it."""

LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIASES),
    BeforeValidator(_limit_biases),
]
"""Numbers by token id; the ids are strings, as in every JSON object."""

BadWords = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, max_length=MAX_BAD_WORDS)
]
"""Words, none of them empty."""

StopTokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
"""Ids of tokens; `server.http.body.limits` compares them with the vocabulary."""

_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"type": "string"}, "text": {"type": "string"}},
}
MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": [{"type": "string"}, _TEXT_PART]}},
                {"type": "null"},
            ]
        },
    },
}
# Reading 40,000 messages takes the event loop 60 ms.
MAX_MESSAGES = 16_384
MessageList = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=MAX_MESSAGES),
    WithJsonSchema(
        {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": MESSAGE_SCHEMA}
    ),
]
"""Messages of a conversation; rendering them checks the rest."""
