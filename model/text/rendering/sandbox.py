"""The Jinja environment of chat templates: Hugging Face's, in Jinja's immutable sandbox.

The sandbox keeps a template away from Python's internals; it bounds neither time nor memory. So only
`model.text.rendering.worker`, a process with limits of the operating system, uses this module.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model.text.rendering.protocol import FUNCTIONS, MAX_SOURCE, MAX_TEXT

_OTHER_TEMPLATES: Final = (nodes.Include, nodes.Extends, nodes.Import, nodes.FromImport)


class TemplateLimitError(Exception):
    """A template is too long, or its text is."""


class TemplateRefusalError(Exception):
    """The template called `raise_exception`; the message is the template's."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates.

    Args:
        mark: applied to every literal text of a template when it is compiled.

    Attributes:
        now: what `strftime_now` formats.
    """

    def __init__(self, mark: Callable[[str], str] = str) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._mark = mark
        self.now = datetime.datetime.fromtimestamp(0, datetime.UTC)
        self.filters["tojson"] = _tojson
        replaced = {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
        }
        self.globals = {name: replaced.get(name) or self.globals[name] for name in FUNCTIONS}

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile a template.

        Raises:
            jinja2.TemplateError: not a valid template, or with a statement that needs other templates.
            TemplateLimitError: too long.
        """
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"it has {len(source)} characters, more than {MAX_SOURCE}")
        tree = self.parse(source)
        for node in tree.find_all(nodes.Node):
            if isinstance(node, _OTHER_TEMPLATES):
                raise jinja2.TemplateSyntaxError(
                    f"the statement {type(node).__name__.lower()!r} is not supported", node.lineno
                )
            if isinstance(node, nodes.TemplateData):
                node.data = self._mark(node.data)
            elif isinstance(node, nodes.Const) and isinstance(node.value, str):
                node.value = self._mark(node.value)
        return self.from_string(tree)

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render a template.

        Args:
            template: from `compile_template`.
            variables: plain JSON values by name.

        Raises:
            TemplateLimitError: the text is too long.
            TemplateRefusalError: the template refused its input.
            Exception: whatever else fails in the template.
        """
        parts, size = [], 0
        for part in template.root_render_func(template.new_context(variables)):
            size += len(part)
            if size > MAX_TEXT:
                raise TemplateLimitError(f"its text has more than {MAX_TEXT} characters")
            parts.append(part)
        return "".join(parts)

    def _strftime_now(self, format: str) -> str:
        return self.now.strftime(format)

    def handle_exception(self, source: str | None = None) -> NoReturn:  # noqa: ARG002 - the signature is Jinja's
        """Raise the error as it is: Jinja would compile code for its traceback."""
        raise  # noqa: PLE0704 - Jinja calls it where it handles an error


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's part for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Hugging Face does: without escaping HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object = "") -> None:
    raise TemplateRefusalError(str(message))
