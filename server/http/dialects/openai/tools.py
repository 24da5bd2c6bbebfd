"""The tools of a request: reads their definitions and `tool_choice`, constrains the text, and renders calls.

`functions` and `function_call` are their older form.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET

from model.errors import GrammarError
from model.text.tools.conversation import as_plain_messages
from model.text.tools.definitions import Tool, make_tool
from model.text.tools.grammar import calls_grammar
from model.text.tools.parser import CallDelta, CallParser, MessageDelta
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

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES: Final = ("none", "auto", "required")


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a message may call.

    Attributes:
        format: of the calls.
        tools: those that may be called.
        definitions: of all tools of the request, for the chat template.
        constraint: the grammar of the message.
    """

    format: ToolFormat
    tools: tuple[Tool, ...]
    definitions: list[dict[str, Any]]
    constraint: StructuredOutput

    def parser(self) -> CallParser:
        """Return the parser of a message."""
        return CallParser(self.format, self.tools)

    def new_id(self) -> str:
        """Return an id for a call."""
        name = uuid.uuid4().hex
        length = self.format.id_characters
        return f"call_{name}" if length is None else name[:length]

    async def check(self, context: AppContext) -> None:
        """Compile the grammar, whose result is kept.

        Raises:
            ValidationError: a schema cannot be compiled; the message names its tool if it is that of one tool.
        """
        try:
            await compile_grammar(context, self.constraint)
        except ValidationError as error:
            for tool in self.tools:
                schema = StructuredOutput("json_schema", tool.schema, "parameters")
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
    constraint: StructuredOutput | None = None,
) -> ToolUse | None:
    """Read the tools of a request.

    Args:
        request: the body.
        context: the application's context.
        nested: whether a definition has its fields in an object `function`, and a choice of several tools in an object
            `allowed_tools`, as in chat; otherwise they are beside `type`, as in responses.
        fields: the field of each definition, for error messages; None if they are all entries of `tools`.
        constraint: on the text, if the body does not state it itself.

    Returns:
        None if the message cannot call any.

    Raises:
        ValidationError: a definition or `tool_choice` is not valid, or the text has another constraint too.
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
        tool = _read_tool(definition, field, context.tool_format, nested=nested)
        if tool.name in tools:
            raise ValidationError(f"`tools` has several functions with the name `{tool.name}`")
        tools[tool.name] = tool
    mode, names = _read_choice("auto" if choice is None else choice, tools, nested=nested)
    if mode == "none":
        return None
    if (other := constraint or find_constraint(request)) is not None:
        raise ValidationError(
            f"`{other.field}` and `tools` exclude each other, unless `tool_choice` is none"
        )
    allowed = tuple(tools[name] for name in names)
    try:
        grammar = calls_grammar(
            context.tool_format,
            allowed,
            context.tokenizer,
            required=mode != "auto",
            parallel=mode != "function" and request.parallel_tool_calls is not False,
        )
    except GrammarError as error:
        raise ValidationError(f"`tools`: {error}") from None
    definitions = request.tools if nested else [_nest(tool) for tool in request.tools]
    calls = StructuredOutput("lark", grammar, "tools")
    return ToolUse(context.tool_format, allowed, definitions, calls)


def messages_for_template(
    context: AppContext, messages: list[dict[str, Any]], tools: ToolUse | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages and tools for the chat template.

    A template that does not read tools gets messages that describe them (`model.text.tools.conversation`).

    Raises:
        ValidationError: such a template is used, and a call in the messages has no name or arguments.
    """
    definitions = None if tools is None else tools.definitions
    template = context.chat_template
    if template is None or template.reads_tools:
        return messages, definitions
    speaks = any(m.get("tool_calls") or m["role"] in ("tool", "function") for m in messages)
    if definitions is None and not speaks:
        return messages, None
    read = [_with_calls(message, f"messages.{i}") for i, message in enumerate(messages)]
    return as_plain_messages(read, definitions or [], context.tool_format), None


class CallRenderer:
    """Renders the calls of one message."""

    def __init__(self, tools: ToolUse) -> None:
        self._tools = tools
        self._parser = tools.parser()

    @property
    def calls_tools(self) -> bool:
        """Whether a call has begun."""
        return self._parser.num_calls > 0

    def push(self, text: str, *, ended: bool) -> tuple[str, list[ToolCallDelta]]:
        """Parse the next piece of the message; return its content, and the pieces of calls.

        Args:
            text: the piece.
            ended: whether it is the last one.
        """
        deltas: list[MessageDelta] = [self._parser.push(text)]
        if ended:
            deltas.append(self._parser.finish())
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


def whole_message(tools: ToolUse, text: str) -> tuple[str | None, list[ToolCall]]:
    """Return the content of a message, null if it has only calls, and its calls."""
    content, deltas = CallRenderer(tools).push(text, ended=True)
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
    definition: dict[str, Any], field: str, format_: ToolFormat, *, nested: bool
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
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        given = quote("", name) if isinstance(name, str) else describe(name)
        raise ValidationError(
            f"`{field}.name` must have 1 to 64 letters, digits, `_`, `-` or `.`. Given: {given}"
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


def _with_calls(message: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a message whose calls have a name, and arguments as an object."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise ValidationError(f"`{field}.tool_calls` must be a list. Given: {describe(calls)}")
    return message | {
        "tool_calls": [_with_arguments(c, f"{field}.tool_calls.{i}") for i, c in enumerate(calls)]
    }


def decode_arguments(arguments: object) -> dict[str, Any] | None:
    """Return the arguments of a call, given as a JSON object or as its text; None if they are neither."""
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return None
    return arguments if isinstance(arguments, dict) else None


def _with_arguments(call: object, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise ValidationError(f"`{field}.function.name` must be a string. Given: {describe(name)}")
    arguments = decode_arguments(function.get("arguments"))
    if arguments is None:
        raise ValidationError(f"`{field}.function.arguments` must be a JSON object")
    return {"function": {"name": name, "arguments": arguments}}


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


def with_tool_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which calls of functions and their results are those of tools."""
    converted = []
    call_id = None
    for i, message in enumerate(messages):
        role, call = message.get("role"), message.get("function_call")
        if role == "assistant" and isinstance(call, dict) and not message.get("tool_calls"):
            call_id = f"call_{i}"
            tool_call = {"id": call_id, "type": "function", "function": call}
            kept = {key: value for key, value in message.items() if key != "function_call"}
            converted.append({**kept, "tool_calls": [tool_call]})
        elif role == "function" and call_id is not None:
            converted.append({**message, "role": "tool", "tool_call_id": call_id})
        else:
            converted.append(message)
    return converted
