"""Writes chat templates that compute too much, or reach for what a template may not have, at random from a grammar."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from jinja2.filters import FILTERS
from jinja2.tests import TESTS

ItemT = TypeVar("ItemT")

SECRET = "canary-5f1c9d"  # noqa: S105 - nobody has this one
"""What no template may read: it is in a file, and in the environment of the process that starts the renderer."""

_TEXTS = (
    "'a'", "'<|im_end|>'", "' \\t\\n'", "''", "'é🙂'", "'%s'", "'{}'", "'0'", "'x' * 999", "big", "SECRET_FILE",
)  # fmt: skip
_NUMBERS = (
    "0", "1", "-1", "7", "99", "4096", "10**6", "10**9", "10**18", "-10**9", "1.5", "1e308", "true",
)  # fmt: skip
_LISTS = (
    "[]", "[1]", "['a', 'b']", "messages", "range(9)", "range(100000)", "(1, 2)", "[[1, [2]]] * 9",
    "big.split('x')",
)  # fmt: skip
_DICTS = (
    "{}", "{'a': 1}", "messages[0]", "dict(a=big)", "namespace(a=[1])", "{'a': {'b': [1, 2]}}",
)  # fmt: skip
_OTHERS = ("none", "missing", "n", "n.v", "loop", "self", "cycler", "joiner", "namespace", "range", "dict", "m",
           "strftime_now", "raise_exception", "varargs", "kwargs", "cycler(1, 2)", "joiner('x')")  # fmt: skip
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and", "or")
_METHODS = {
    kind: [name for name in dir(kind) if not name.startswith("__")]
    for kind in (str, list, dict, tuple, int, float, bytes)
}
_OWN_METHODS = (
    "next", "reset", "current", "cycle", "changed", "name", "arguments", "send", "index0", "previtem", "mro",
)  # fmt: skip
_SIMPLE = ("upper", "lower", "title", "trim", "escape", "urlencode", "forceescape", "capitalize")
_NAMES = (
    "d", "attribute", "width", "separators", "indent", "default", "length", "count", "by", "fill_with", "first", "sep",
    "maxsplit", "base", "precision", "method", "reverse", "trim_url_limit", "linenum", "case_sensitive", "a", "b",
)  # fmt: skip
_INTERNALS = (
    "__class__", "__mro__", "__bases__", "__subclasses__", "__globals__", "__builtins__", "__code__", "__init__",
    "__self__", "__func__", "__dict__", "__import__", "__getattribute__", "__reduce_ex__", "gi_frame", "gi_code",
    "f_back",
    "f_globals", "tb_frame", "cr_frame", "ag_frame", "func_globals", "im_func", "mro", "_environment", "_func",
    "environment",
    "_TemplateReference__context", "_context", "_undefined_obj", "__html__", "__format__", "__call__", "__wrapped__",
)  # fmt: skip
_ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__ }}",
    "{{ (messages|attr('__class__'))|attr('__base__')|attr('__subclasses__')() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ ('{0.__class__}'|attr('format'))(messages) }}",
    "{{ ['{0.__class__}']|map('format', messages)|list }}",
    "{{ ['{0.__class__.__init__.__globals__}'.format]|map('string')|list }}",
    "{{ messages|map(attribute='__class__.__mro__')|list }}",
    "{{ messages|groupby('__class__')|list }}",
    "{{ messages|sort(attribute='__class__') }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ joiner.__init__.__globals__.__builtins__.open('SECRET_PATH').read() }}",
    "{{ raise_exception.__globals__ }}{{ strftime_now.__self__ }}{{ strftime_now.__func__.__globals__ }}",
    "{{ 'x'.encode('idna') }}{{ 'x'.encode('zlib') }}{{ 'x'.encode('unicode_escape').decode('uu') }}",
    "{% include 'SECRET_PATH' %}",
    "{% import 'SECRET_PATH' as x %}",
    "{% from 'os' import system %}",
    "{% extends 'SECRET_PATH' %}",
    "{% set n = namespace() %}{% set n.__class__ = dict %}{{ n.__class__ }}{{ n._Namespace__attrs }}",
    "{{ namespace(__class__=1, _a=2)._a }}",
    "{% macro f() %}{{ caller.__globals__ }}{{ varargs.__class__ }}{% endmacro %}{% call f() %}{% endcall %}",
    "{% for x in messages %}{{ loop.__class__ }}{{ loop._iterator.gi_frame }}{{ loop.__init__ }}{% endfor %}",
    "{{ messages|map('tojson')|list }}{{ (messages|map('upper')).gi_frame.f_back.f_globals }}",
    "{{ strftime_now('%Y' * 100000)|length }}{{ strftime_now('%999999999Y') }}",
    "{{ self.__init__.__globals__ }}{{ self.blocks }}{{ self._context }}",
    "{{ messages.append(1) }}{{ messages.__iadd__([1]) }}{{ messages[0].update(a=1) }}{{ messages.sort() }}",
    "{{ url_for.__globals__ }}{{ config }}{{ request.application.__globals__ }}{{ get_flashed_messages }}",
    "{{ missing.__init__.__globals__ }}{{ missing._undefined_exception }}{{ missing._fail_with_undefined_error }}",
)
# Each computes too much within one call of a function, where Python handles no signal.
_ONE_CALL = (
    "{{ ['a'] * 3 | join(d=big * 999) }}",
    "{{ messages | tojson(separators=(big * 99, big * 99)) }}",
    "{{ range(100000) | list | tojson(separators=('x' * 99999, ':')) }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '%-*d' % (10**9, 1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ '{0:>999999999}'.format('a') }}",
    "{{ big.strip(big * 99) }}{{ big.lstrip(range(99999)|join) }}",
    "{% for i in range(100000) %}{{ big.strip('y' * 1000000) }}{% endfor %}",
)
_NAMED = (
    "{{ 'a' * 10**12 }}",
    "{{ (10**9) ** (10**9) }}",
    "{{ ('9' * 4000000) | int }}",
    "{% set n = namespace(v=[1]) %}{% for i in range(60) %}{% set n.v = [n.v, n.v] %}{% endfor %}{{ n.v }}",
    "{% set n = namespace(v=[1]) %}{% for i in range(60) %}{% set n.v = [n.v, n.v] %}{% endfor %}{{ n.v == n.v }}",
    "{% set n = namespace(v='ab') %}{% for i in range(99) %}{% set n.v = n.v ~ n.v %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{{ big | wordwrap(1) | wordwrap(1) | urlize | title | striptags }}",
    "{{ big | center(10**9) }}{{ 'a'.zfill(10**9) }}",
    "{{ 'a\tb'.expandtabs(10**9) }}",
    "{{ range(100000) | batch(1, big) | list }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ 'a' | indent(10**9, true) }}{{ 1 | round(10**9) }}",
    "{{ 1 | round(-10**9) }}{{ (10**4000) | round(400) }}",
    "{{ ('a' * 99999 ~ 'b') | replace('a', 'a' * 99999) }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ big.translate({120: big}) }}",
    "{{ (range(100000) | list) | sort(attribute='x') | unique | list | pprint }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "-" * 20000 + "1 }}",
    "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "{% for i in range(3) %}" * 40 + "x" + "{% endfor %}" * 40,
    "{{ [" + "1," * 300000 + "] | length }}",
    "{{ " + " ~ ".join(["'abc'"] * 20000) + " }}",
    "x" * 1_000_000 + "{% for i in range(100000) %}" + "y" * 1000 + "{% endfor %}",
)


class TemplateWriter:
    """Writes hostile templates.

    Args:
        seed: of the random choices.
        secret_path: a file with `SECRET`.
    """

    def __init__(self, seed: int, secret_path: str) -> None:
        self._random = random.Random(seed)
        self._secret_path = secret_path

    def named(self) -> list[str]:
        """Return templates that are always worth trying: known attacks and known escapes."""
        return [self._with_path(source) for source in (*_ONE_CALL, *_ESCAPES, *_NAMED)]

    def write(self) -> str:
        """Return a random template."""
        count = self._random.randint(1, 3)
        body = "".join(self._statement(2) for _ in range(count))
        start = (
            "{% set big = messages[0].content %}{% set n = namespace(v=" + self._value() + ") %}"
        )
        return self._with_path(start + body)

    def _with_path(self, source: str) -> str:
        source = source.replace("SECRET_FILE", f"'{self._secret_path}'")
        return source.replace("SECRET_PATH", self._secret_path)

    def _pick(self, choices: Sequence[ItemT]) -> ItemT:
        return self._random.choice(choices)

    def _value(self) -> str:
        kinds = (_TEXTS, _TEXTS, _NUMBERS, _LISTS, _DICTS, _OTHERS)
        return self._pick(self._random.choice(kinds))

    def _expression(self, depth: int) -> str:
        if depth <= 0:
            return self._value()
        if self._random.random() < 0.4:
            return self._random.choice((self._text, self._items))(depth)
        forms: tuple[Callable[[int], str], ...] = (
            self._operation, self._filtered, self._filtered, self._call, self._call, self._internal, self._format,
            self._slice, self._collection, self._test, self._function,
        )  # fmt: skip
        return self._random.choice(forms)(depth - 1)

    def _text(self, depth: int) -> str:
        """Return an expression whose value is a text, so that the template goes on."""
        if depth <= 0:
            return "(" + self._pick(_TEXTS[:-1]) + ")"
        text, other, items = self._text(depth - 1), self._text(depth - 1), self._items(depth - 1)
        number = self._number()
        return "(" + self._random.choice((
            f"{text} ~ {other}", f"{text} + {other}", f"{text} * {number}", f"{text}.replace({other}, {text})",
            f"{text} | replace({other}, {text})", f"{items} | join({text})", f"{items} | join(d={text})",
            f"{text}.join({items} | map('string'))", f"{items} | tojson(indent={number})", f"{items} | pprint",
            f"{items} | tojson(separators=({text}, {other}))", f"{items} | string",
            f"{text} | indent({number}, true)",
            f"{text} | center({number})", f"{text}.ljust({number}, 'é')", f"{text}.zfill({number})",
            f"{text}[::{number}]",
            f"{text}.strip({other})", f"{text}.lstrip({other})", f"{text}.expandtabs({number})", f"{text} | urlize",
            f"{text} | wordwrap({number})", f"{text} | truncate({number}, true, {other})", f"{text} | striptags",
            f"{text} | {self._pick(_SIMPLE)}",
            f"'%{number.replace('10**', '9').strip('-')}d' % 1", f"'%*d' % ({number}, 1)",
            f"'%.{{}}f'.format({number}) % 1.5",
            f"'{{:>{{}}}}'.format({text}, {number})", f"'{{0}}{{0}}{{0}}'.format({text})",
            f"{text} | format({other})",
            f"'%s%s%s' % ({text}, {text}, {other})", f"{text}.translate({{97: {other}}})", f"strftime_now({text})",
            f"{text} | xmlattr if false else {other}", f"{text} if {text} == {other} else {other}",
            f"({number}) | string",
            f"{text}.partition({other}) | join", f"{text} | int | string", f"{text}.swapcase()",
            f"{text} | wordcount ~ ''",
            f"{text}.count({other}) ~ ''", f"({text} in {other}) ~ ''", f"{text}.encode().hex()",
            f"({number}) | filesizeformat",
        )) + ")"  # fmt: skip

    def _items(self, depth: int) -> str:
        """Return an expression whose value is a list, or something similar."""
        if depth <= 0:
            return "(" + self._pick(_LISTS) + ")"
        text, items, other = self._text(depth - 1), self._items(depth - 1), self._items(depth - 1)
        number = self._number()
        return "(" + self._random.choice((
            f"{items} | list + {other} | list", f"({items} | list) * {number}", f"{text}.split({text})",
            f"{text} | list",
            f"{items} | batch({number}, {text}) | list", f"{items} | slice({number}) | list", f"[{items}, {items}]",
            f"{items} | map('string') | list", f"{items} | map('tojson') | list", f"range({number})",
            f"{items} | list | reverse",
            f"{items} | map('string') | sort", f"{items} | map('string') | unique | list", f"{text}.splitlines()",
            f"{{'a': {items}, 'b': {text}}} | dictsort", f"{items} | map('string') | groupby(0)",
            f"({items} | list)[::{number}]",
            f"{text}.split()", f"dict(a={items}, b={other}) | items | list", f"[{text}] * {number}",
            f"{items} | select | list",
        )) + ")"  # fmt: skip

    def _number(self) -> str:
        return self._pick(_NUMBERS[:10])

    def _operation(self, depth: int) -> str:
        operator = self._pick(_OPERATORS)
        if operator in ("*", "%") and self._random.random() < 0.6:
            return f"({self._pick(_TEXTS + _LISTS)} {operator} {self._pick(_NUMBERS)})"
        if operator in ("/", "//", "**", "-"):
            return f"({self._pick(_NUMBERS)} {operator} {self._pick(_NUMBERS)})"
        return f"({self._expression(depth)} {operator} {self._expression(depth)})"

    def _arguments(self, depth: int, most: int = 3) -> str:
        count = self._pick([0, 0, 1, 1, 1, 2, most])
        given = [self._expression(depth) for _ in range(count)]
        if self._random.random() < 0.15:
            given.append(self._pick(_NAMES) + "=" + self._expression(depth))
        return ", ".join(given)

    def _filtered(self, depth: int) -> str:
        name = self._pick([*FILTERS, "join", "tojson", "map", "select", "replace"])
        arguments = self._arguments(depth)
        if name in ("map", "select", "reject", "selectattr", "rejectattr"):
            inner = self._pick([*FILTERS, *_INTERNALS])
            arguments = ", ".join(filter(None, (f"'{inner}'", arguments)))
        return f"({self._expression(depth)} | {name}({arguments}))"

    def _call(self, depth: int) -> str:
        kind = self._pick([str, str, str, list, dict, tuple, int, float, bytes, None])
        if kind is None:
            return (
                f"({self._expression(depth)}).{self._pick(_OWN_METHODS)}({self._arguments(depth)})"
            )
        values = {
            str: _TEXTS,
            list: _LISTS,
            dict: _DICTS,
            tuple: ("(1, 'a')",),
            int: _NUMBERS,
            float: ("1.5",),
        }
        value = self._pick(values.get(kind, ("big.encode()",)))
        if kind is str and self._random.random() < 0.5:
            value = f"({self._expression(depth)} | string)"
        return f"({value}).{self._pick(_METHODS[kind])}({self._arguments(depth)})"

    def _internal(self, depth: int) -> str:
        name = self._pick(_INTERNALS)
        value = self._expression(depth)
        forms = (
            f"({value}).{name}",
            f"({value})['{name}']",
            f"({value}) | attr('{name}')",
            f"('{{0.{name}}}').format({value})",
            f"'{{a.{name}}}'.format_map({{'a': {value}}})",
            f"({value}).{name}.{self._pick(_INTERNALS)}",
            f"({value}).{name}()",
        )
        return "(" + self._pick(list(forms)) + ")"

    def _format(self, depth: int) -> str:
        width = self._pick(
            ["", "9", "99999", "999999999", "*", ".99999999", "-0999999", "(a)9999999"]
        )
        if self._random.random() < 0.5:
            return f"('%{width}{self._pick(list('sdrfxge%'))}' % {self._expression(depth)})"
        spec = self._pick(
            [
                "{}",
                "{:>99999999}",
                "{:{}}",
                "{0!r:.9}",
                "{0[0]}",
                "{a:0999999}",
                "{:,}",
                "{:é^9999999}",
            ]
        )
        return f"('{spec}' * {self._pick(['1', '9', '99999'])}).format({self._arguments(depth)})"

    def _slice(self, depth: int) -> str:
        bounds = [self._pick(["", "0", "1", "-1", "10**9", "-10**9"]) for _ in range(3)]
        return f"({self._expression(depth)})[{':'.join(bounds)}]"

    def _collection(self, depth: int) -> str:
        one, other = self._expression(depth), self._expression(depth)
        return self._pick(
            [f"[{one}, {other}]", f"({one}, {other})", "{" + f"1: {one}, 'a': {other}" + "}"]
        )

    def _test(self, depth: int) -> str:
        name = self._pick([name for name in TESTS if name.isidentifier()])
        argument = f"({self._value()})" if self._random.random() < 0.3 else ""
        return f"({self._expression(depth)} is {name}{argument})"

    def _function(self, depth: int) -> str:
        name = self._pick(
            [
                "range",
                "dict",
                "namespace",
                "cycler",
                "joiner",
                "strftime_now",
                "raise_exception",
                "lipsum",
            ]
        )
        return f"{name}({self._arguments(depth)})"

    def _statement(self, depth: int) -> str:
        expression = self._expression(self._random.randint(1, 3))
        if depth <= 0:
            return "{{ " + expression + " }}"
        inner = self._statement(depth - 1)
        times = self._pick(["3", "9", "60", "1000", "100000"])
        forms = (
            "{{ " + expression + " }}",
            "{{ " + expression + " }}" + inner,
            "{% for x in range(" + times + ") %}" + inner + "{% endfor %}",
            "{% for x in " + expression + " %}" + inner + "{% else %}" + inner + "{% endfor %}",
            "{% for x in " + expression + " if " + self._expression(1) + " %}" + inner + "{% endfor %}",
            "{% for x in " + expression + " recursive %}" + inner + "{{ loop([x, x]) }}{% endfor %}",
            "{% for x in range(" + times + ") %}{% set n.v = " + self._doubling() + " %}{% endfor %}{{ n.v }}" + inner,
            "{% set n.v = " + expression + " %}" + inner,
            "{% set x = " + expression + " %}{{ x }}" + inner,
            "{% set x %}" + inner + "{% endset %}{{ x * 99 }}",
            "{% macro m(a, b=" + expression + ") %}" + inner + "{{ m(a, a) }}{% endmacro %}{{ m(1) }}",
            "{% macro m(a) %}{% if a %}{{ m(a - 1) }}{{ m(a - 1) }}{% endif %}" + inner + "{% endmacro %}{{ m(30) }}",
            "{% macro m() %}{{ caller() }}" + inner + "{% endmacro %}{% call m() %}" + inner + "{% endcall %}",
            "{% filter " + self._pick(list(FILTERS)) + " %}" + inner + "{% endfilter %}",
            "{% if " + expression + " %}" + inner + "{% else %}" + inner + "{% endif %}",
            "{% generation %}" + inner + "{% endgeneration %}",
            "{% with x = " + expression + " %}" + inner + "{% endwith %}",
            "{% block b" + str(self._random.randrange(10**6)) + " %}" + inner + "{% endblock %}",
            self._random.choice(_ESCAPES),
        )  # fmt: skip
        return self._random.choice(forms)

    def _doubling(self) -> str:
        return self._pick([
            "n.v ~ n.v", "[n.v, n.v]", "n.v + n.v", "n.v * 2", "n.v * n.v", "{1: n.v, 2: n.v}", "(n.v, n.v)",
            "n.v | tojson", "n.v | string", "n.v ~ big", "[n.v] | join(n.v)", "n.v.replace('', n.v)",
            "n.v | replace('a', n.v)", "n.v | list",
            "'%s%s' % (n.v, n.v)", "'{0}{0}'.format(n.v)", "n.v | escape", "dict(a=n.v, b=n.v)", "n.v.join([n.v, n.v])",
        ])  # fmt: skip
