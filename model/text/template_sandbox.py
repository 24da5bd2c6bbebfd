"""Renders Jinja templates of unknown origin with bounds on time, memory and output.

Jinja's sandbox keeps a template away from Python's internals but lets it compute without limit. This environment
charges everything that creates a value or repeats work to a `Budget`: operators, calls, filters, tests, literals,
slices, loop passes and output. Between two charges only work proportional to one value runs, and no value may exceed
`MAX_VALUE`, so a render that reaches a limit ends soon after (`model.text.template_limits`). Filters and methods that
are not listed here are refused.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Final, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace, pass_context

from model.text.template_limits import (
    ITEM,
    MAX_INDENT,
    MAX_SECONDS,
    MAX_SOURCE,
    MAX_VALUE,
    STEP,
    Budget,
    TemplateLimitError,
    TemplateRefusalError,
    check_bits,
    check_format,
    check_indent,
    check_join,
    check_percent,
    check_product,
    check_replace,
    check_round,
    check_widths,
    depth,
    limited,
    weight,
)

# fmt: off
_FILTERS: Final = frozenset((
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format",
    "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "title", "trim",
    "truncate", "unique", "upper",
))
_METHODS: Final[dict[type, frozenset[str]]] = {
    str: frozenset((
        "capitalize", "casefold", "count", "endswith", "find", "format", "format_map", "index", "isalnum", "isalpha",
        "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
        "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
        "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    )),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
# fmt: on
_OTHER_TEMPLATES = (nodes.Block, nodes.Include, nodes.Extends, nodes.Import, nodes.FromImport)
# Jinja's own objects: all their attributes without an underscore.
_OWN = (Cycler, Joiner, LoopContext, Macro, Namespace, Undefined)


class _Context(Context):
    """A context with the budget of its rendering."""

    budget: Budget


class _Generator(CodeGenerator):
    """Generates code that charges the budget where a value is created or compared without a call."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._guarded(super().visit_Concat, node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._guarded(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._guarded(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._guarded(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._guarded(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.step(context) and ")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_EnvironmentAttribute(self, node: nodes.EnvironmentAttribute, frame: Frame) -> None:
        super().visit_EnvironmentAttribute(node, frame)
        self.write("(context)")

    def _guarded(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.guard(context, ")
        visit(node, frame)
        self.write(")")


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's part for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Formatter(SandboxedFormatter):
    """Formats with bounded widths and a bounded result."""

    total = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        check_widths("%" + format_spec)
        weight(value)
        text: str = super().format_field(value, format_spec)
        self.total = limited(self.total + len(text))
        return text

    def convert_field(self, value: Any, conversion: Any) -> Any:
        weight(value)
        return super().convert_field(value, conversion)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of Hugging Face's chat templates, bounded.

    Args:
        mark: applied to every literal text of a template when it is compiled.
    """

    code_generator_class = _Generator
    context_class = _Context
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, mark: Callable[[str], str] = str) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols],
            finalize=_finalize,
        )  # fmt: skip
        self._mark = mark
        self.concat = _concat  # type: ignore[method-assign] # as Jinja documents
        self.filters = {
            name: _bounded_filter(name, function)
            for name, function in self.filters.items()
            if name in _FILTERS
        }
        self.filters["tojson"] = _bounded_filter("tojson", _tojson)
        self.tests = {name: _bounded_test(cast(Any, test)) for name, test in self.tests.items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": _make_dict,
            "namespace": _Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile a template.

        Raises:
            jinja2.TemplateError: not a valid template, or with a statement that needs other templates.
            TemplateLimitError: too long.
        """
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"it has {len(source)} characters, more than {MAX_SOURCE}")
        tree = self.parse(source)
        self._prepare(tree)
        return self.from_string(tree)

    def render(
        self,
        template: jinja2.Template,
        variables: Mapping[str, object],
        seconds: float = MAX_SECONDS,
    ) -> str:
        """Render a template.

        Args:
            template: from `compile_template`.
            variables: plain JSON values by name.
            seconds: limit of time.

        Raises:
            TemplateLimitError: a limit was reached.
            TemplateRefusalError: the template refused its input.
            Exception: whatever else fails in the template.
        """
        context = cast(_Context, template.new_context(dict(variables)))
        context.budget = Budget(seconds)
        context.budget.charge(sum(weight(value) for value in variables.values()) // ITEM)
        return _concat(template.root_render_func(context))

    def guard(self, context: _Context, value: Any) -> Any:
        """Charge a new value and return it."""
        context.budget.charge(STEP + weight(value))
        return value

    def step(self, context: _Context) -> bool:
        """Charge a step; return true."""
        context.budget.step()
        return True

    def call(self, context: _Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call a function from a template."""
        context.budget.step()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            if obj.__name__ == "replace":
                check_replace(owner, *args, **kwargs)
            elif obj.__name__ == "join":
                args = tuple(check_join(values, owner) for values in args)
        return self.guard(context, _eager(super().call(context, obj, *args, **kwargs)))

    def call_binop(self, context: _Context, operator: str, left: Any, right: Any) -> Any:  # type: ignore[override]
        """Apply an operator."""
        if operator == "*":
            check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * max(0, right))
        elif operator == "%" and isinstance(left, str):
            check_percent(left, right)
        return self.guard(context, super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ARG002 - the signature is Jinja's
        """Return whether a template may read an attribute: a listed method, or one of Jinja's own objects'."""
        # By type, since `isinstance` asks an object for its class, which runs code of `Namespace`.
        kind = type(obj)
        methods = _METHODS.get(kind)
        if methods is None:
            if issubclass(kind, _OWN):
                return not attr.startswith("_")
            listed = (names for base, names in _METHODS.items() if issubclass(kind, base))
            methods = next(listed, frozenset())
        return attr in methods

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a bounded `str.format` or `str.format_map`; None if the value is neither."""
        owner = getattr(value, "__self__", None)
        name = getattr(value, "__name__", "")
        if not isinstance(owner, str) or name not in ("format", "format_map"):
            return None

        def bounded(*args: Any, **kwargs: Any) -> Any:
            if name == "format_map":
                return _Formatter(self).vformat(owner, (), *args)
            return _Formatter(self).vformat(owner, args, kwargs)

        return bounded

    def _prepare(self, tree: nodes.Template) -> None:
        """Mark literal texts, and make every loop pass a step."""
        for node in list(tree.find_all(nodes.Node)):
            if isinstance(node, _OTHER_TEMPLATES):
                raise jinja2.TemplateSyntaxError(
                    f"the statement {type(node).__name__.lower()!r} is not supported", node.lineno
                )
            if isinstance(node, nodes.TemplateData):
                node.data = self._mark(node.data)
            elif isinstance(node, nodes.Const) and isinstance(node.value, str):
                node.value = self._mark(node.value)
            elif isinstance(node, nodes.For):
                step = nodes.EnvironmentAttribute("step", lineno=node.lineno)
                node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
                if node.test is not None:
                    node.test = nodes.And(step, node.test, lineno=node.lineno)
            elif isinstance(node, nodes.AssignBlock) and node.filter is None:
                # Charges the block's text.
                node.filter = nodes.Filter(None, "string", [], [], None, None, lineno=node.lineno)


class _Namespace(Namespace):
    """`namespace()`, without attributes that begin with an underscore.

    A namespace may contain itself, so that its text is fixed.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        weight(values)
        if any(str(name).startswith("_") for name in values):
            raise jinja2.TemplateError("names in a namespace cannot begin with an underscore")
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.TemplateError("names in a namespace cannot begin with an underscore")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _concat(parts: Any) -> str:
    """Join the texts of a block."""
    found: list[str] = []
    total = 0
    for part in parts:
        total = limited(total + len(part))
        found.append(part)
    return "".join(found)


@pass_context
def _finalize(context: _Context, value: Any) -> Any:
    """Charge a value before it is written."""
    context.budget.charge(STEP + weight(value))
    return value


def _eager(value: Any) -> Any:
    """Return the items of an iterator or a view as a list: the work happens here, not in whatever reads it."""
    if isinstance(value, Iterator | KeysView | ValuesView | ItemsView):
        value = list(itertools.islice(value, MAX_VALUE // ITEM + 1))
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    check = _FILTER_CHECKS.get(name)
    pass_arg = getattr(function, "jinja_pass_arg", None)
    passed = pass_arg.name if pass_arg is not None else ""

    def bounded(context: _Context, *args: Any, **kwargs: Any) -> Any:
        context.budget.step()
        if check is not None:
            check(*args, **kwargs)
        if passed == "context":
            args = (context, *args)
        elif passed == "eval_context":
            args = (context.eval_ctx, *args)
        elif passed == "environment":
            args = (context.environment, *args)
        result = _eager(function(*args, **kwargs))
        context.budget.charge(weight(result))
        return result

    return pass_context(bounded)


def _bounded_test(function: Callable[..., bool]) -> Callable[..., bool]:
    if hasattr(function, "jinja_pass_arg"):  # `filter` and `test`, which look up a name
        return function

    @functools.wraps(function)
    def bounded(context: _Context, *args: Any) -> bool:
        context.budget.step()
        return function(*args)

    return pass_context(bounded)


_FILTER_CHECKS: Final[dict[str, Callable[..., object]]] = {
    "replace": check_replace,
    "join": check_join,
    "indent": check_indent,
    "round": check_round,
    "format": check_format,
    "string": weight,
}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Hugging Face does: without escaping HTML."""
    size = weight(value)
    if indent is not None:
        width = len(indent) if isinstance(indent, str) else indent
        if width > MAX_INDENT:
            raise TemplateLimitError(f"an indent is larger than {MAX_INDENT}")
        limited(size // ITEM * width * depth(value))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object = "") -> None:
    weight(message)
    raise TemplateRefusalError(str(message))


def _strftime_now(format: str) -> str:
    check_widths(format)
    return datetime.datetime.now().astimezone().strftime(format)
