"""Structured output: the constraint of a request, and its compilation to a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from server.errors import ValidationError

if TYPE_CHECKING:
    from server.http.context import AppContext


class StructuredOutput(NamedTuple):
    """A constraint on the generated text, as the request states it.

    Attributes:
        kind: the language of `value`.
        value: a JSON schema, a regular expression, a list of choices, a Lark grammar or a structural tag; None for
            `json_object`.
        field: the request's field that holds it, for error messages.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark", "structural_tag"]
    value: object
    field: str


async def compile_grammar(
    context: AppContext,  # noqa: ARG001
    wanted: StructuredOutput,
) -> str:
    """Compile a constraint to a serialized grammar, in a thread.

    Raises:
        ValidationError: the constraint is not valid, is not supported, or is too costly.
    """
    raise ValidationError(f"`{wanted.field}` is not supported by this version")
