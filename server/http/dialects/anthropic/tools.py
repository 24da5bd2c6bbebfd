"""Reads the tools of the Messages API: they become those of a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from server.errors import ValidationError
from server.http.body.validation import describe, quote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.http.dialects.anthropic.schema import ConversationFields

_NO_EFFECT: Final = ("allowed_callers", "defer_loading", "input_examples")
_MODES: Final = {"auto": "auto", "any": "required", "none": "none"}
_MOST_NAMED: Final = 8


class ChatTools(NamedTuple):
    """The tools of a request, in the form of the Responses API.

    Attributes:
        definitions: of the tools.
        fields: the request's field of each of them.
        choice: which of them are called; None for the default.
        parallel: whether one message may have several calls; None for the default.
        eager: names of the tools whose input is streamed while it is generated.
        warnings: what has no effect.
    """

    definitions: list[dict[str, Any]]
    fields: list[str]
    choice: str | dict[str, Any] | None
    parallel: bool | None
    eager: frozenset[str]
    warnings: tuple[str, ...]


def chat_tools(request: ConversationFields) -> ChatTools:
    """Return the tools of a request.

    Only those with a schema can be called; tools that Anthropic runs or defines are left out.

    Raises:
        ValidationError: a definition or the choice is not valid.
    """
    definitions: list[dict[str, Any]] = []
    fields: list[str] = []
    skipped: list[str] = []
    ignored: set[str] = set()
    eager: set[str] = set()
    for i, tool in enumerate(request.tools or ()):
        kind = tool.get("type")
        if not isinstance(kind, str | None):
            raise ValidationError(f"`tools.{i}.type` must be a string. Given: {describe(kind)}")
        if kind not in (None, "custom"):
            skipped.append(f"`tools.{i}`")
            continue
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise ValidationError(
                f"`tools.{i}.input_schema` must be a JSON schema, an object. Given: {describe(schema)}"
            )
        definition: dict[str, Any] = {"type": "function"}
        definition |= {key: tool[key] for key in ("name", "description", "strict") if key in tool}
        definitions.append(definition | {"parameters": schema})
        fields.append(f"tools.{i}")
        ignored |= {key for key in _NO_EFFECT if tool.get(key)}
        name = tool.get("name")
        if isinstance(name, str) and tool.get("eager_input_streaming") is True:
            eager.add(name)
    warnings = [f"`tools`: `{key}` has no effect" for key in sorted(ignored)]
    if skipped:
        warnings.append(f"{_enumerate(skipped)} cannot be called: only tools with a schema can")
    choice = request.tool_choice
    parallel = choice is None or not choice.disable_parallel_tool_use
    return ChatTools(
        definitions,
        fields,
        _read_choice(request, [tool.get("name") for tool in definitions]),
        None if parallel else False,
        frozenset(eager),
        tuple(warnings),
    )


def _read_choice(
    request: ConversationFields, names: Sequence[object]
) -> str | dict[str, Any] | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        if choice.type == "any" and not names:
            raise ValidationError("`tool_choice` must be auto or none without `tools`. Given: any")
        return _MODES[choice.type]
    if choice.name is None or choice.name not in names:
        given = describe(None) if choice.name is None else quote("", choice.name)
        raise ValidationError(
            f"`tool_choice.name` must be the name of a tool with a schema. Given: {given}"
        )
    return {"type": "function", "name": choice.name}


def _enumerate(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown
