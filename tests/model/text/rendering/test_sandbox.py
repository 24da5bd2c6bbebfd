"""Templates end in bounded time and memory, whatever they compute."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from model.text.template_limits import MAX_SOURCE, TemplateLimitError, TemplateRefusalError
from model.text.template_sandbox import BoundedEnvironment

BIG = "x" * 1_000_000

HOSTILE = {
    "repetition": "{{ 'a' * 10**12 }}",
    "repetition of a list": "{{ [1] * 10**12 }}",
    "repetition, reversed": "{{ 10**12 * 'a' }}",
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "literal output in a loop": "{% for i in range(100000) %}" + "x" * 1000 + "{% endfor %}",
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by +": "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by a block": "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s %}{{ n.s }}{{ n.s }}"
    "{% endset %}{% endfor %}",
    "doubling lists": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}",
    "doubling objects": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = {1: n.s, 2: n.s} %}"
    "{% endfor %}",
    "doubling dict()": "{% set n = namespace(s=1) %}{% for i in range(99) %}{% set n.s = dict(a=n.s, b=n.s) %}"
    "{% endfor %}",
    "deep tuples": "{% set n = namespace(s=()) %}{% for i in range(99999) %}{% set n.s = (n.s,) %}{% endfor %}"
    "{{ {n.s: 1} }}",
    "many copies": "".join(f"{{% set a{i} = big[{i}:] %}}" for i in range(5000)),
    "copies in a loop": "{% for i in range(100000) %}{% set s = big[i:] %}{% endfor %}",
    "many blocks": "{% set x %}{% for i in range(99999) %}aaaaaaaaaa{% endfor %}{% endset %}" * 200,
    "comparisons": "{% for i in range(100000) %}{{ 'xy' in big }}{% endfor %}",
    "tests": "{% for i in range(100000) %}{{ big is in([big]) }}{{ big is upper }}{% endfor %}",
    "powers": "{{ (10**9) ** (10**9) }}",
    "products": "{% set n = namespace(i=9) %}{% for i in range(999) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "a large base": "{{ ('f' * 1000000) | int(base=16) }}",
    "width of %": "{{ '%1000000000d' % 1 }}",
    "precision of %": "{{ '%.1000000000f' % 1 }}",
    "variable width of %": "{{ '%*d' % (10**9, 1) }}",
    "named width of %": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "repeated %": "{{ ('%(a)s' * 1000) % {'a': big} }}",
    "width of the filter": "{{ '%1000000000d' | format(1) }}",
    "width of format": "{{ '{:1000000000}'.format(1) }}",
    "nested width of format": "{{ '{:{}}'.format(1, 10**9) }}",
    "repeated format": "{{ ('{0}' * 1000).format(big) }}",
    "format_map": "{{ ('{a}' * 1000).format_map({'a': big}) }}",
    "replace": "{{ big | replace('x', big) }}",
    "method replace": "{{ big.replace('', big) }}",
    "join": "{{ range(100000) | join(big) }}",
    "method join": "{{ big.join(big) }}",
    "indent": "{{ ('a\n' * 1000) | indent(10**8) }}",
    "indent of JSON": "{{ [1] | tojson(indent=10**9) }}",
    "precision of round": "{{ 1 | round(-10**9) }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "branching recursion":
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "chained filters":
    "{% for i in range(99) %}{{ (range(100000)|map('string')|map('upper')|list)|length }}{% endfor %}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_ends_soon_and_needs_little_memory(source) -> None:
    environment = BoundedEnvironment()
    template = environment.compile_template(source)
    began = time.thread_time()
    with pytest.raises((TemplateLimitError, RecursionError, OverflowError)):
        environment.render(template, {"big": BIG}, seconds=0.5)

    assert time.thread_time() - began < 2


def test_work_is_limited_even_if_there_is_time() -> None:
    environment = BoundedEnvironment()
    template = environment.compile_template(HOSTILE["nested loops"])
    with pytest.raises(TemplateLimitError, match="too much"):
        environment.render(template, {}, seconds=600)


@pytest.mark.parametrize(
    "name", ["doubling", "doubling lists", "many copies", "many blocks", "join"]
)
def test_the_memory_of_a_rendering_is_bounded(name) -> None:
    environment = BoundedEnvironment()
    template = environment.compile_template(HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimitError):
            environment.render(template, {"big": BIG}, seconds=5)  # more than twice the default
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 300 << 20


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}", "{{ x.__init__.__globals__ }}", "{{ cycler.__init__ }}", "{{ x.pop('a') }}",
        "{{ x.update(x) }}", "{{ [].append(1) }}", "{{ 'a'.ljust(9) }}", "{{ 'a'.encode() }}", "{{ (1).bit_length() }}",
        "{{ namespace(_a=1) }}", "{{ 'a' | attr('__class__') }}", "{{ '{0.__class__}'.format(x) }}", "{{ lipsum() }}",
    ],
)  # fmt: skip
def test_the_sandbox_stays_closed(source) -> None:
    environment = BoundedEnvironment()
    try:
        text = environment.render(environment.compile_template(source), {"x": {"a": 1}})
    except Exception:  # noqa: BLE001 - any refusal will do
        return
    assert text == ""


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
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)  # fmt: skip
def test_what_chat_templates_use_is_there(source, expected) -> None:
    environment = BoundedEnvironment()

    assert (
        environment.render(environment.compile_template(source), {"x": {"k": [1, 2]}}) == expected
    )


def test_a_template_may_refuse_its_input() -> None:
    environment = BoundedEnvironment()
    with pytest.raises(TemplateRefusalError, match=r"^no$"):
        environment.render(environment.compile_template("{{ raise_exception('no') }}"), {})


def test_a_long_template_is_an_error() -> None:
    with pytest.raises(TemplateLimitError, match="characters, more than"):
        BoundedEnvironment().compile_template("x" * (MAX_SOURCE + 1))


def test_time_is_limited_even_if_little_is_computed() -> None:
    environment = BoundedEnvironment()
    template = environment.compile_template("{% for i in range(100000) %}{{ i }}{% endfor %}")
    with pytest.raises(TemplateLimitError, match="too long"):
        environment.render(template, {}, seconds=0.001)


def test_renderings_in_several_threads_have_budgets_of_their_own() -> None:
    from concurrent.futures import ThreadPoolExecutor

    environment = BoundedEnvironment()
    good = environment.compile_template("{% for i in range(1000) %}{{ i }}{% endfor %}")
    bad = environment.compile_template(HOSTILE["doubling"])

    def failing() -> None:
        with pytest.raises(TemplateLimitError):
            environment.render(bad, {})

    with ThreadPoolExecutor(4) as pool:
        renders = [pool.submit(environment.render, good, {}) for _ in range(20)]
        failures = [pool.submit(failing) for _ in range(20)]
        assert len({render.result() for render in renders}) == 1
        assert all(failure.result() is None for failure in failures)
