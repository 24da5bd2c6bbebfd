"""The tools of a request: reads their definitions and `tool_choice`, constrains the message, and renders calls.

`functions` and `function_call` are their older form.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET

from model.errors import GrammarError
from model.text.tools.definitions import Tool, make_tool
from model.text.tools.parser import CallDelta, CallParser, MessageDelta
from model.text.tools.translate import Constrained, ToolsConstraint
from server.engine.core.request import FinishReason
from server.errors import ValidationError
from server.http.body.validation import describe, quote
from server.http.dialects.openai.constraints import find_constraint
from server.http.dialects.openai.replies import CalledFunction, ToolCall, ToolCallDelta
from server.http.text.structured_output import StructuredOutput, compile_grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.text.tools.formats import ToolFormat
    from server.http.context import AppContext
    from server.http.dialects.openai.schema import ChatBody
    from server.http.reply.completion import Completion

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_CHOICES: Final = ("none", "auto", "required")


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a message may call.

    Attributes:
        format: of the calls.
        tools: those that may be called.
        definitions: of all tools of the request, for the chat template.
        constraint: the grammar of the message.
        text: the constraint on a message without calls; None if it is free, or there is none.
        atomic: whether the vocabulary has tokens for the parts of calls.
        warnings: a sentence for each field without effect.
    """

    format: ToolFormat
    tools: tuple[Tool, ...]
    definitions: list[dict[str, Any]]
    constraint: StructuredOutput
    text: StructuredOutput | None
    atomic: bool
    warnings: tuple[str, ...] = ()

    def parser(self) -> CallParser:
        """Return the parser of a message."""
        return CallParser(
            self.format, self.tools, atomic=self.atomic, constrained=self.text is not None
        )

    def new_id(self, prefix: str = "call_") -> str:
        """Return an id for a call; the prefix is left out where the format prescribes the length."""
        name = uuid.uuid4().hex
        length = self.format.id_characters
        return f"{prefix}{name}" if length is None else name[:length]

    async def check(self, context: AppContext) -> None:
        """Compile the grammar, whose result is kept.

        Raises:
            ValidationError: a schema cannot be compiled; the message names its tool if it is that of one tool, or the
                field of the constraint on the text.
        """
        try:
            await compile_grammar(context, self.constraint)
        except ValidationError as error:
            if self.text is not None:
                await compile_grammar(context, self.text)
            for tool in self.tools:
                schema = StructuredOutput(
                    "json_schema", tool.schema, "parameters", strict=tool.strict
                )
                try:
                    await compile_grammar(context, schema)
                except ValidationError as cause:
                    raise _refusal(tool.name, cause.reason) from None
            raise error from None


def read_tools(
    request: ChatBody,
    context: AppContext,
    *,
    nested: bool = True,
    fields: Sequence[str] | None = None,
    longest_name: int = 64,
    constraint: StructuredOutput | None = None,
) -> ToolUse | None:
    """Read the tools of a request.

    Args:
        request: the body.
        context: the application's context.
        nested: whether a definition has its fields in an object `function`, and a choice of several tools in an object
            `allowed_tools`, as in chat; otherwise they are beside `type`, as in responses.
        fields: the field of each definition, for error messages; None if they are all entries of `tools`.
        longest_name: limit of the characters of a name.
        constraint: on the text, if the body does not state it itself. The message is calls, or text that follows it.

    Returns:
        None if the message cannot call any.

    Raises:
        ValidationError: a definition or `tool_choice` is not valid.
    """
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise ValidationError(
                f"`tool_choice` must be none or auto without `tools`. Given: {describe(choice)}"
            )
        return None
    if len(request.tools) > MAX_TOOLS:
        raise ValidationError(
            f"`tools` supports up to {MAX_TOOLS} entries. Given: {len(request.tools)}"
        )
    tools: dict[str, Tool] = {}
    for i, definition in enumerate(request.tools):
        field = f"tools.{i}" if fields is None else fields[i]
        tool = _read_tool(
            definition, field, context.tool_format, nested=nested, longest_name=longest_name
        )
        if tool.name in tools:
            raise ValidationError(f"`tools` has several functions with the name `{tool.name}`")
        tools[tool.name] = tool
    mode, names = _read_choice("auto" if choice is None else choice, tools, nested=nested)
    if mode == "none":
        return None
    format_, tokenizer = context.tool_format, context.tokenizer
    allowed = tuple(tools[name] for name in names)
    text = constraint or find_constraint(request)
    warnings: tuple[str, ...] = ()
    if text is not None and mode != "auto":
        warnings = (f"`{text.field}` has no effect, since `tool_choice` requires a call",)
        text = None
    wanted = ToolsConstraint(
        format=format_.name,
        tools=[(tool.name, tool.schema, tool.strict) for tool in allowed],
        required=mode != "auto",
        parallel=mode != "function" and request.parallel_tool_calls is not False,
        text=text and Constrained(text.kind, text.value, text.field, text.strict),
    )
    definitions = request.tools if nested else [_nest(tool) for tool in request.tools]
    calls = StructuredOutput("tools", wanted, "tools")
    marker = format_.marker or format_.optional_marker
    atomic = tokenizer.library.token_to_id(marker) is not None
    return ToolUse(format_, allowed, definitions, calls, text, atomic, warnings)


class CallRenderer:
    """Renders the calls of one message."""

    def __init__(self, tools: ToolUse) -> None:
        self._tools = tools
        self._parser = tools.parser()

    @property
    def complete(self) -> bool:
        """Whether the message has calls, and the last one has all of its arguments."""
        return self._parser.num_calls > 0 and self._parser.call_complete

    def push(self, completion: Completion, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Parse the next piece of the message; return its content, and the pieces of calls.

        Args:
            completion: the message, to which the piece was appended.
            text: the piece.
        """
        deltas = read_piece(self._parser, completion, text)
        content = "".join(delta.content + delta.trailing for delta in deltas)
        return content, [self._delta(call) for delta in deltas for call in delta.calls]

    def _delta(self, call: CallDelta) -> ToolCallDelta:
        if call.name is None:
            function = CalledFunction(arguments=call.arguments)
            return ToolCallDelta(index=call.index, function=function)
        function = CalledFunction(name=call.name, arguments=call.arguments)
        return ToolCallDelta(
            index=call.index, id=self._tools.new_id(), type="function", function=function
        )


def read_piece(parser: CallParser, completion: Completion, text: str) -> list[MessageDelta]:
    """Parse the next piece of a message, and its end if it has ended.

    Args:
        parser: of the message.
        completion: the message, to which the piece was appended.
        text: the piece.
    """
    deltas = [parser.push(text)]
    if completion.finish_reason is not None:
        cut_off = completion.finish_reason is not FinishReason.EOS
        deltas.append(parser.finish(cut_off=cut_off, after=completion.after))
    return deltas


def whole_message(
    renderer: CallRenderer, completion: Completion
) -> tuple[str | None, list[ToolCall]]:
    """Return the content of a message, null if it has only calls, and its calls."""
    content, deltas = renderer.push(completion, completion.text)
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is UNSET:
            last = calls.pop()
            arguments = last.function.arguments + delta.function.arguments
            function = CalledFunction(name=last.function.name, arguments=arguments)
            calls.append(ToolCall(id=last.id, function=function))
        else:
            calls.append(ToolCall(id=delta.id, function=delta.function))
    return (content if content or not calls else None), calls


def _nest(definition: dict[str, Any]) -> dict[str, Any]:
    """Return a definition of responses as one of chat. `strict` is for the server, not for the model."""
    hidden = ("type", "strict")
    function = {k: v for k, v in definition.items() if k not in hidden and v is not None}
    return {"type": "function", "function": function}


def _read_tool(
    definition: dict[str, Any],
    field: str,
    format_: ToolFormat,
    *,
    nested: bool,
    longest_name: int,
) -> Tool:
    kind = definition.get("type")
    if kind is None and nested and "function" in definition:
        kind = "function"
    if kind != "function":
        given = quote("", kind) if isinstance(kind, str) else describe(kind)
        raise ValidationError(f"`{field}.type` must be `function`. Given: {given}")
    function, field = _inner(definition, "function", field, nested=nested)
    if not isinstance(function, dict):
        raise ValidationError(f"`{field}` must be an object. Given: {describe(function)}")
    name = function.get("name")
    if not isinstance(name, str) or len(name) > longest_name or not _NAME.fullmatch(name):
        given = quote("", name) if isinstance(name, str) else describe(name)
        raise ValidationError(
            f"`{field}.name` must have 1 to {longest_name} letters, digits, `_`, `-` or `.`. "
            f"Given: {given}"
        )
    for key, kinds, expected in (
        ("parameters", dict, "a JSON schema, an object"),
        ("description", str, "a string"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(key)
        if value is not None and not isinstance(value, kinds):
            raise ValidationError(
                f"`{field}.{key}` of the tool `{name}` must be {expected}. Given: {describe(value)}"
            )
    try:
        strict = bool(function.get("strict"))
        return make_tool(format_, name, function.get("parameters"), strict=strict)
    except GrammarError as error:
        raise _refusal(name, f"`parameters`: {error}") from None


def _refusal(name: str, reason: str) -> ValidationError:
    return ValidationError(f"`tools`: the tool `{name}` cannot be used: {reason}")


def _inner(value: object, key: str, field: str, *, nested: bool) -> tuple[object, str]:
    """Return the object with the fields of a definition or choice, and its field."""
    if not nested:
        return value, field
    return (value.get(key) if isinstance(value, dict) else None), f"{field}.{key}"


def _read_choice(
    choice: object, tools: dict[str, Tool], *, nested: bool
) -> tuple[str, Sequence[str]]:
    """Return `none`, `auto`, `required` or `function` for one by name, and the names of the tools to choose from."""
    if isinstance(choice, str):
        if choice in _CHOICES:
            return choice, list(tools)
        if nested and choice in tools:  # as in Text Generation Inference
            return "function", [choice]
        raise ValidationError(
            f"`tool_choice` must be none, auto, required or an object. Given: {quote('', choice)}"
        )
    assert isinstance(choice, dict)
    kind, mode = choice.get("type"), "function"
    if kind is None and nested and "function" in choice:
        kind = "function"
    if kind == "function":
        names = [_named(choice, "tool_choice", tools, nested=nested)]
    elif kind == "allowed_tools":
        allowed, field = _inner(choice, "allowed_tools", "tool_choice", nested=nested)
        entries = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(allowed, dict) or not isinstance(entries, list) or not entries:
            raise ValidationError(f"`{field}.tools` must be a list, not empty")
        mode = str(allowed.get("mode"))
        if mode not in _CHOICES[1:]:
            raise ValidationError(f"`{field}.mode` must be auto or required")
        names = [
            _named(entry, f"{field}.tools.{i}", tools, nested=nested)
            for i, entry in enumerate(entries)
        ]
    else:
        given = quote("", kind) if isinstance(kind, str) else describe(kind)
        raise ValidationError(
            f"`tool_choice.type` must be function or allowed_tools. Given: {given}"
        )
    return mode, list(dict.fromkeys(names))


def _named(entry: object, field: str, tools: dict[str, Tool], *, nested: bool) -> str:
    function, field = _inner(entry, "function", field, nested=nested)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValidationError(f"`{field}.name` must be a string. Given: {describe(name)}")
    if name not in tools:
        known = ", ".join(f"`{tool}`" for tool in list(tools)[:8])
        raise ValidationError(
            f"`{field}.name` must be the name of a tool: {known}. Given: {quote('', name)}"
        )
    return name


def with_tools(request: ChatBody) -> ChatBody:
    """Return a request whose functions are tools, of which a message calls one at most.

    The definitions and the choice have their fields beside `type`, as in responses.

    Raises:
        ValidationError: the request has tools too, or `function_call` is not valid.
    """
    for older, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(request, older) is not None and getattr(request, newer) is not None:
            raise ValidationError(f"`{older}` and `{newer}` exclude each other")
    functions = [{**function, "type": "function"} for function in request.functions or ()]
    return request.model_copy(
        update={
            "tools": functions,
            "tool_choice": _read_function_call(request.function_call),
            "parallel_tool_calls": False,
        }
    )


def _read_function_call(choice: object) -> object:
    if choice in (None, "none", "auto"):
        return choice
    if isinstance(choice, dict) and isinstance(choice.get("name"), str):
        return {"type": "function", "name": choice["name"]}
    given = quote("", choice) if isinstance(choice, str) else describe(choice)
    raise ValidationError(
        f"`function_call` must be none, auto or an object with the `name` of a function. Given: {given}"
    )
