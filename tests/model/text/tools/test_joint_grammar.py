"""A message is calls or a value: the grammar allows both and nothing else, and the parser tells them apart."""

import json

import pytest

from model.sampling.grammar import GrammarTokenizer, compile_matcher, translate
from model.text.tools.formats import BY_NAME, FORMATS
from model.text.tools.parser import CallParser
from model.text.tools.translate import Constrained, ToolsConstraint
from tests.model.text.tools.tool_cases import (
    CALLS,
    SCHEMAS,
    TEXTS,
    make_tokenizer,
    make_tools,
    parse,
)

NAMES = [row.name for row in FORMATS]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["a"],
    "additionalProperties": False,
}
NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f"],
}
VALUES = [
    ("json_schema", SCHEMA, ['{"a": 2}'], ['{"a": 4}', '{"b": 2}', "text", ""]),
    ("json_schema", NAMED, ['{"name": "weather"}', '{"name": "now", "parameters": 3}'], ["{}"]),
    ("json_schema", {"type": "array", "items": {"type": "integer"}}, ["[1, 2]"], ["[x]"]),
    ("json_object", None, ['{"a": [true]}', "{}", '{"name": "x"}'], ["text", "[1]"]),
    ("regex", "a/b+|[{]x", ["a/bb", "{x"], ["ab", ""]),
    ("choice", ["yes", "{no}", "["], ["yes", "{no}", "["], ["ye", "maybe"]),
    ("lark", 'start: "a" X\nX: /x+/', ["axx"], ["ay"]),
    ("lark", 'root ::= "é" [a-c]', ["éb"], ["éd"]),
    ("structural_tag", TAG, ["hi <f>{}</f>"], ["hi <f>3</f>"]),
]


@pytest.fixture(scope="module", params=["text", "special", "added"])
def tokenizer(request):
    tokens = sorted({text for row in FORMATS for text in row.tokens})
    return make_tokenizer(**({} if request.param == "text" else {request.param: tokens}))


def joint(name, tokenizer, kind, value, *, parallel=True):
    text = Constrained(kind, value, "response_format", strict=False)
    tools = [(tool, schema, False) for tool, schema in SCHEMAS.items()]
    constraint = ToolsConstraint(name, tools, required=False, parallel=parallel, text=text)
    return translate("tools", constraint, tokenizer=tokenizer).grammar


def follows(grammar, tokenizer, text):
    matcher = compile_matcher(GrammarTokenizer(tokenizer, tokenizer.vocab_size), grammar)
    return all(map(matcher.accept, tokenizer.encode(text))) and matcher.is_accepting


def parsed(name, pieces, **options):
    format_ = BY_NAME[name]
    parser = CallParser(format_, make_tools(format_), constrained=True)
    return parse(parser, pieces, **options)


@pytest.mark.parametrize(
    ("kind", "value", "allowed", "refused"), VALUES, ids=[f"{v[0]}-{i}" for i, v in enumerate(VALUES)]
)  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_calls_and_values_are_allowed_and_told_apart(
    name, tokenizer, kind, value, allowed, refused
):
    grammar = joint(name, tokenizer, kind, value)

    assert follows(grammar, tokenizer, TEXTS[name])
    assert parsed(name, [TEXTS[name]]).decoded() == CALLS
    assert not follows(grammar, tokenizer, TEXTS[name].replace("3", "0"))
    for text in allowed:
        assert follows(grammar, tokenizer, text), text
        for pieces in ([text], text):
            message = parsed(name, pieces)
            assert (message.content, message.calls) == (text, []), text
    for text in refused:
        assert not follows(grammar, tokenizer, text), text


@pytest.mark.parametrize("name", NAMES)
def test_without_parallel_calls_there_is_one(name, tokenizer):
    grammar = joint(name, tokenizer, "json_object", None, parallel=False)

    assert not follows(grammar, tokenizer, TEXTS[name])


def test_a_value_that_goes_on_after_what_a_call_would_end_with_is_no_call(tokenizer):
    call = '{"name": "now", "parameters": {}'
    grammar = joint("llama3", tokenizer, "json_object", None)
    for text in (call + ', "x": 1}', '{"name": "now", "parameters": 3}', call + "}"):
        assert follows(grammar, tokenizer, text)
        whole, characters = parsed("llama3", [text]), parsed("llama3", text)
        assert vars(whole) == vars(characters)
        assert bool(whole.calls) == text.endswith("{}}")
        assert whole.content == ("" if whole.calls else text)


def test_calls_after_a_marker_are_returned_while_they_are_generated():
    format_ = BY_NAME["llama3"]
    parser = CallParser(format_, make_tools(format_), constrained=True)

    delta = parser.push('<|python_tag|>{"name": "now", "parameters": {"a')

    assert delta.calls[0].arguments == '{"a'


@pytest.mark.parametrize("name", NAMES)
def test_a_choice_that_begins_a_call_is_not_one(name, tokenizer):
    begin = BY_NAME[name].marker or "<|python_tag|>"
    grammar = joint(name, tokenizer, "choice", ["a", begin + "x"])

    assert follows(grammar, tokenizer, "a")
    assert not follows(grammar, tokenizer, begin + "x")
    assert json.loads(grammar) if grammar.startswith("{") else "ANY" in grammar
