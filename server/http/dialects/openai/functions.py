"""`functions` and `function_call`, the older form of tools in chat: reads them, and renders a call in their form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.errors import ValidationError
from server.http.body.validation import describe, quote

if TYPE_CHECKING:
    from server.http.dialects.openai.schema import ChatBody


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
            "tool_choice": _read_choice(request.function_call),
            "parallel_tool_calls": False,
        }
    )


def _read_choice(choice: object) -> object:
    if choice in (None, "none", "auto"):
        return choice
    if isinstance(choice, dict) and isinstance(choice.get("name"), str):
        return {"type": "function", "name": choice["name"]}
    given = quote("", choice) if isinstance(choice, str) else describe(choice)
    raise ValidationError(
        f"`function_call` must be none, auto or an object with the `name` of a function. Given: {given}"
    )
