"""The formats in which models write calls of tools, and how the format of a checkpoint is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

from model.text.tokenizer import Tokenizer

ToolFormatName: TypeAlias = Literal["hermes", "qwen3-coder", "llama3", "mistral", "mistral-args"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes calls.

    The calls of a message end it. They are `marker`, `opening`, the first call, each further call after `separator`,
    and `closing`. A call is `head` with the tool's name in the place of NAME, the arguments, and `tail`.

    Attributes:
        name: of the format.
        marker: begins the calls, after any text. Empty if a message with calls has no text before them.
        optional_marker: may stand before the first call if `marker` is empty.
        opening: see above.
        head: see above.
        arguments: `json` is a JSON object; `xml` a list of `<parameter=KEY>` elements, where text is not quoted.
        tail: see above.
        separator: see above.
        closing: see above.
        tokens: texts that are tokens of their own in the vocabularies of such models.
        id_characters: length of a call's id; None for any.
    """

    name: ToolFormatName
    marker: str
    optional_marker: str = ""
    opening: str = ""
    head: str
    arguments: Literal["json", "xml"] = "json"
    tail: str
    separator: str
    closing: str = ""
    tokens: tuple[str, ...]
    id_characters: int | None = None

    def head_of(self, tool: str) -> str:
        """Return the beginning of a call of a tool."""
        return self.head.replace("NAME", tool)


# Sources: the chat templates and model cards of Qwen3, Qwen3-Coder, Llama 3.1, Mistral 7B v0.3 and Mistral Small 3.2.
FORMATS: Final = (
    ToolFormat(
        name="hermes",
        marker="<tool_call>",
        head='\n{"name": "NAME", "arguments": ',
        tail="}\n</tool_call>",
        separator="\n<tool_call>",
        tokens=("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        name="qwen3-coder",
        marker="<tool_call>",
        head="\n<function=NAME>\n",
        arguments="xml",
        tail="</function>\n</tool_call>",
        separator="\n<tool_call>",
        tokens=("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        name="llama3",
        marker="",
        optional_marker="<|python_tag|>",
        head='{"name": "NAME", "parameters": ',
        tail="}",
        separator="; ",
        tokens=("<|python_tag|>",),
    ),
    ToolFormat(
        name="mistral",
        marker="[TOOL_CALLS]",
        opening="[",
        head='{"name": "NAME", "arguments": ',
        tail="}",
        separator=", ",
        closing="]",
        tokens=("[TOOL_CALLS]",),
        id_characters=9,
    ),
    ToolFormat(
        name="mistral-args",
        marker="[TOOL_CALLS]",
        head="NAME[ARGS]",
        tail="",
        separator="[TOOL_CALLS]",
        tokens=("[TOOL_CALLS]", "[ARGS]"),
        id_characters=9,
    ),
)
BY_NAME: Final = {row.name: row for row in FORMATS}

# The first row whose texts are all in a template decides.
_SIGNS: Final[tuple[tuple[ToolFormatName, tuple[str, ...]], ...]] = (
    ("mistral-args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3-coder", ("<function=",)),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('"parameters"', "<|start_header_id|>")),
)


def find_format(name: str, templates: Iterable[str], tokenizer: Tokenizer) -> ToolFormat:
    """Return the format of a checkpoint.

    Args:
        name: the setting: of a format, or `auto` to find it.
        templates: sources of the checkpoint's chat templates.
        tokenizer: of the checkpoint; tells the formats of Mistral apart where the template does not.

    Returns:
        `hermes` if nothing tells.
    """
    if name != "auto":
        return BY_NAME[name]  # type: ignore[index]
    text = "\0".join(templates)
    for found, signs in _SIGNS:
        if all(sign in text for sign in signs):
            if found == "mistral" and tokenizer.library.token_to_id("[ARGS]") is not None:
                return BY_NAME["mistral-args"]
            return BY_NAME[found]
    return BY_NAME["hermes"]
