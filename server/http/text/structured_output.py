"""Structured output: the constraint of a request, and its compilation to a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from server.errors import ValidationError
from server.http.text.grammar_compiler import Constraint

if TYPE_CHECKING:
    from server.http.context import AppContext


class StructuredOutput(NamedTuple):
    """A constraint on the generated text, as the request states it.

    Attributes:
        kind: the language of `value`.
        value: a JSON schema, a regular expression, a list of choices, a Lark grammar or a structural tag; None for
            `json_object`.
        field: the request's field that holds it, for error messages.
        strict: whether a keyword of a JSON schema that the grammar cannot enforce is an error.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark", "structural_tag"]
    value: object
    field: str
    strict: bool = False


async def compile_grammar(context: AppContext, wanted: StructuredOutput) -> str:
    """Compile a constraint to a serialized grammar, for `SamplingParams.grammar`.

    Does not block the event loop. Results are cached by content.

    Raises:
        ValidationError: the constraint is not valid, is not supported, or is too costly.
        OverloadedError: too many constraints wait.
        UnavailableError: the engine is not ready.
    """
    verdict = await context.grammars.check(
        Constraint(wanted.kind, wanted.value), context.engine_info().vocab_size
    )
    if verdict.error:
        raise ValidationError(f"`{wanted.field}`: {verdict.error}")
    return verdict.grammar
