"""The language of chat templates: Hugging Face's, within Jinja's sandbox. Its limits are those of a process."""

from __future__ import annotations

import jinja2
import pytest

from model.text.rendering.protocol import FUNCTIONS, MAX_SOURCE
from model.text.rendering.sandbox import (
    TemplateEnvironment,
    TemplateLimitError,
    TemplateRefusalError,
)


def render(source: str, **variables: object) -> str:
    environment = TemplateEnvironment()
    return environment.render(environment.compile_template(source), variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}", "{{ x.__init__.__globals__ }}", "{{ cycler.__init__ }}", "{{ x.pop('a') }}",
        "{{ x.update(x) }}", "{{ [].append(1) }}", "{{ dict.mro() }}", "{{ range.__class__ }}",
        "{{ x|map('upper').gi_frame }}",
        "{{ 'a' | attr('__class__') }}", "{{ '{0.__class__}'.format(x) }}", "{{ lipsum() }}", "{{ self._context }}",
        "{{ ('{0.__class__}' | attr('format'))(x) }}", "{{ ['{0.__class__}'] | map('format', x) | list }}",
        "{{ strftime_now.__func__ }}", "{{ raise_exception.__globals__ }}",
    ],
)  # fmt: skip
def test_the_sandbox_stays_closed(source) -> None:
    try:
        text = render(source, x={"a": 1})
    except Exception:  # noqa: BLE001 - any refusal will do
        return
    assert text in ("", "['{0.__class__}']")


@pytest.mark.parametrize("statement", ["include", "extends", "import"])
def test_a_statement_that_needs_another_template_is_no_template(statement) -> None:
    source = f"\n{{% {statement} 'x' {'as y' if statement == 'import' else ''} %}}"
    with pytest.raises(jinja2.TemplateSyntaxError, match="not supported") as caught:
        render(source)

    assert caught.value.lineno == 2


def test_the_functions_of_a_template_are_those_that_no_variable_may_replace() -> None:
    assert set(TemplateEnvironment().globals) == FUNCTIONS


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<b>é'} | tojson }}", '{"a": "<b>é"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": [\n    2\n  ],\n  "b": 1\n}'),
        ("{{ x | tojson(separators=(',', ':')) }}", '{"k":[1,2]}'),
        ("{% generation %}a{% set z = 1 %}{% endgeneration %}", "a"),
        ("{% for i in [1, 2, 3, 4] %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
         "{{ loop.length }}{{ loop.last }}{% endfor %}", "14False34False"),
        ("{% for k, v in x.items() %}{{ k }}{{ v }}{% endfor %}", "k[1, 2]"),
        ("{% for k, v in x | items %}{{ k }}{{ v }}{% endfor %}", "k[1, 2]"),
        ("{% for i in [1, 2, 3] if i != 2 %}{{ loop.index }}{{ i }}{% else %}no{% endfor %}", "1123"),
        ("    {% if true %}\na\n    {% endif %}\nb", "a\nb"),
        ("{% macro m(a, b='c') %}{{ a ~ b }}{% endmacro %}{{ m('x') }}", "xc"),
        ("{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}y{% endcall %}", "[y]"),
        ("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}", "2"),
        ("{{ '%s-%d' % ('a', 3) }}{{ '{}{b}'.format(1, b=2) }}{{ 'a,b'.split(',')[-1] }}", "a-312b"),
        ("{{ [1, 2, 3][1:] }}{{ 'abc'[::-1] }}{{ [3, 1] | sort | first }}{{ none }}{{ missing }}", "[2, 3]cba1None"),
        ("{{ x.k | map('string') | join('+') }}{{ ['a'] | map('upper') | list }}", "1+2['A']"),
        ("{{ [x] | selectattr('k', 'defined') | list | length }}{{ 'b' in ['a'] }}{{ 3 is odd }}", "1FalseTrue"),
        ("{% set t %}{{ 1 }} two{% endset %}{{ t | length }}{% filter upper %}a{% endfilter %}", "5A"),
        ("{{ '<' | escape }}{{ '<' | safe }}{{ 'x' if missing is defined else 'y' }}", "&lt;<y"),
        ("{{ strftime_now('%Y') }}{% block a %}b{% endblock %}{{ 'a' | center(3) }}", "1970b a "),
    ],
)  # fmt: skip
def test_what_chat_templates_use_is_there(source, expected) -> None:
    assert render(source, x={"k": [1, 2]}) == expected


def test_a_template_may_refuse_its_input() -> None:
    with pytest.raises(TemplateRefusalError, match=r"^no$"):
        render("{{ raise_exception('no') }}")


def test_a_long_template_is_an_error() -> None:
    with pytest.raises(TemplateLimitError, match="characters, more than"):
        render("x" * (MAX_SOURCE + 1))


def test_a_text_is_not_collected_beyond_its_limit() -> None:
    with pytest.raises(TemplateLimitError, match="its text has more than 8000000 characters"):
        render("{% for i in range(99999) %}{{ x }}{% endfor %}", x="x" * 1000)
