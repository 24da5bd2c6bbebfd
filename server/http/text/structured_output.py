"""Structured output: the constraint of a request, and its compilation to a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from server.errors import OverloadedError, UnavailableError, ValidationError
from server.http.request_id import current_request
from server.http.text.grammar_compiler import Constraint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.http.context import AppContext


class StructuredOutput(NamedTuple):
    """A constraint on the generated text, as the request states it.

    Attributes:
        kind: the language of `value`.
        value: a JSON schema, a regular expression, a list of choices, a Lark grammar, a structural tag or a
            `model.text.tools.translate.ToolsConstraint`; None for `json_object`.
        field: the request's field that holds it, for error messages.
        strict: whether a keyword of a JSON schema that the grammar cannot enforce is an error.
    """

    kind: Literal[
        "json_schema", "json_object", "regex", "choice", "lark", "structural_tag", "tools"
    ]
    value: object
    field: str
    strict: bool = False


class CompiledConstraint(NamedTuple):
    """A constraint with its grammar.

    Attributes:
        grammar: for `SamplingParams.grammar`.
        constraint: as it was compiled.
        warnings: a sentence for each schema of which the grammar does not enforce all; empty if it enforces everything.
    """

    grammar: str
    constraint: Constraint
    warnings: tuple[str, ...] = ()

    async def violations(self, context: AppContext, texts: Sequence[str]) -> tuple[str, ...]:
        """Return a sentence for each way in which complete texts violate what the grammar does not enforce."""
        if not self.warnings or not texts:
            return ()
        try:
            found = await context.grammars.find_violations(
                self.constraint, texts, context.engine_info().vocab_size, current_request().client
            )
        except (OverloadedError, UnavailableError):
            found = None
        if found is None:
            return ("whether the value matches the schema could not be checked",)
        return tuple(f"the value does not match the schema: {phrase}" for phrase in found)


async def compile_grammar(context: AppContext, wanted: StructuredOutput) -> CompiledConstraint:
    """Compile a constraint to a serialized grammar.

    Does not block the event loop. Results are cached by content. The request holds no place meanwhile.

    Raises:
        ValidationError: the constraint is not valid, is not supported, or is too costly.
        OverloadedError: too many constraints wait, or no place is free afterwards.
        UnavailableError: the engine is not ready, or the constraint cannot be checked at the moment.
    """
    constraint = Constraint(wanted.kind, wanted.value, wanted.strict)
    with context.admission.aside():
        verdict = await context.grammars.check(
            constraint, context.engine_info().vocab_size, current_request().client
        )
    if verdict.error:
        raise ValidationError(f"`{wanted.field}`: {verdict.error}")
    warnings = tuple(f"`{wanted.field}`: {phrase}" for phrase in verdict.unenforced)
    return CompiledConstraint(verdict.grammar, constraint, warnings)
