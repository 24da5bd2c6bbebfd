"""The tools of /v1/responses: functions, custom tools and namespaces become functions; others run at the provider."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from server.errors import ValidationError
from server.http.body.validation import describe

if TYPE_CHECKING:
    from server.http.dialects.openai.schema import ResponseBody

INPUT: Final = "input"
"""The parameter of a custom tool as a function."""

# Types in the OpenAI API of tools that a client or the provider runs, and of which only the provider has definitions.
_SKIPPED: Final = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer-preview", "computer_use_preview", "file_search",
        "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
        "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    }
)  # fmt: skip
_CALLABLE: Final = ("function", "custom")


class CalledTool(NamedTuple):
    """How the output names a tool.

    Attributes:
        name: of the tool.
        namespace: that has the tool; None for none.
        custom: whether calls have a text instead of arguments.
    """

    name: str
    namespace: str | None = None
    custom: bool = False


class ResponseTools(NamedTuple):
    """The tools of one request.

    Attributes:
        functions: definitions, as of a request that has functions only.
        fields: the request's field of each of them.
        choice: of these functions.
        called: of each function whose calls the output names otherwise, by its name.
        warnings: what became of the other tools.
    """

    functions: list[dict[str, Any]]
    fields: list[str]
    choice: Any
    called: dict[str, CalledTool]
    warnings: tuple[str, ...]


def read_response_tools(request: ResponseBody) -> ResponseTools:
    """Turn the tools of a request into functions. Definitions of unknown types stay, to be refused.

    Raises:
        ValidationError: a namespace or the format of a custom tool is not valid.
    """
    reader = _Reader()
    for i, tool in enumerate(request.tools or ()):
        reader.add(tool, f"tools.{i}")
    choice = reader.read_choice(request.tool_choice)
    return ResponseTools(
        reader.functions, reader.fields, choice, reader.called, tuple(reader.warnings)
    )


def _is_skipped(kind: object) -> bool:
    return isinstance(kind, str) and kind in _SKIPPED


def qualified(name: str, namespace: object) -> str:
    """Return the name by which the model sees a tool."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


class _Reader:
    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self.fields: list[str] = []
        self.called: dict[str, CalledTool] = {}
        self.warnings: list[str] = []

    def add(self, tool: dict[str, Any], field: str) -> None:
        kind = tool.get("type")
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            self.warnings.append(
                f"`{field}`: the functions of the namespace have its name before theirs"
            )
            for i, inner in enumerate(tool["tools"]):
                place = f"{field}.tools.{i}"
                if not isinstance(inner, dict):
                    raise ValidationError(f"`{place}` must be an object. Given: {describe(inner)}")
                self._add_callable(inner, place, tool.get("name"))
        elif _is_skipped(kind):
            self.warnings.append(f"`{field}`: tools of the type `{kind}` are not available")
        else:
            self._add_callable(tool, field, None)

    def _add_callable(self, tool: dict[str, Any], field: str, namespace: object) -> None:
        name = tool.get("name")
        function = tool
        if isinstance(name, str):
            custom = tool.get("type") == "custom"
            seen = qualified(name, namespace)
            if custom:
                function = self._custom(tool, field)
            if custom or seen != name:
                self.called[seen] = CalledTool(name, str(namespace) if namespace else None, custom)
                function = {**function, "name": seen}
        self.functions.append(function)
        self.fields.append(field)

    def _custom(self, tool: dict[str, Any], field: str) -> dict[str, Any]:
        """Return a custom tool as a function with one text."""
        self.warnings.append(f"`{field}`: the custom tool is a function with the string `{INPUT}`")
        text: dict[str, Any] = {"type": "string"}
        format_ = tool.get("format")
        if isinstance(format_, dict) and format_.get("type") == "grammar":
            if format_.get("syntax") == "regex":
                definition = format_.get("definition")
                if not isinstance(definition, str):
                    raise ValidationError(
                        f"`{field}.format.definition` must be a string. Given: {describe(definition)}"
                    )
                text["pattern"] = f"^(?:{definition})$"
            else:
                self.warnings.append(f"`{field}.format`: the grammar of the text is not enforced")
        return {
            "type": "function",
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": {
                "type": "object",
                "properties": {INPUT: text},
                "required": [INPUT],
                "additionalProperties": False,
            },
            "strict": "pattern" in text,
        }

    def read_choice(self, choice: Any) -> Any:  # noqa: ANN401 - a JSON value
        """Return the choice of a tool as that of a function."""
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") in _CALLABLE:
            return self._chosen(choice)
        entries = choice.get("tools")
        if choice.get("type") != "allowed_tools" or not isinstance(entries, list):
            return choice
        kept = []
        for i, entry in enumerate(entries):
            kind = entry.get("type") if isinstance(entry, dict) else None
            if _is_skipped(kind):
                self.warnings.append(
                    f"`tool_choice.tools.{i}`: tools of the type `{kind}` are not available"
                )
            else:
                kept.append(self._chosen(entry) if kind in _CALLABLE else entry)
        return {**choice, "tools": kept}

    def _chosen(self, entry: dict[str, Any]) -> dict[str, Any]:
        name = entry.get("name")
        if isinstance(name, str):
            known = [tool.get("name") for tool in self.functions]
            seen = qualified(name, entry.get("namespace"))
            if seen not in known:
                seen = next((s for s, tool in self.called.items() if tool.name == name), name)
            name = seen
        return {"type": "function", "name": name}


# A part of the text of a JSON string that ends with a whole character.
_WHOLE: Final = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*'
)
_BEGIN: Final = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')


class InputDecoder:
    """Decodes the text of a call of a custom tool from the JSON of its arguments, piece by piece."""

    def __init__(self) -> None:
        self._rest = ""
        self._begun = False

    def push(self, arguments: str) -> str:
        """Return the text that a piece of the arguments completes."""
        self._rest += arguments
        if not self._begun:
            begin = _BEGIN.match(self._rest)
            if begin is None:
                return ""
            self._begun, self._rest = True, self._rest[begin.end() :]
        whole = _WHOLE.match(self._rest)
        assert whole is not None
        self._rest = self._rest[whole.end() :]
        text: str = msgspec.json.decode(f'"{whole[0]}"')
        return text
