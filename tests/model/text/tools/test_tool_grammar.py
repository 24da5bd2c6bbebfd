"""The grammars of calls allow what the models' templates write, and nothing that breaks a schema."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import GrammarError
from model.text.tools.definitions import lower_tool, make_tool
from model.text.tools.formats import BY_NAME, FORMATS, find_format
from model.text.tools.grammar import calls_grammar
from model.text.tools.parser import CallParser
from tests.model.text.tools.tool_cases import TEXTS, follows, make_tokenizer, make_tools

NAMES = [row.name for row in FORMATS]


@pytest.fixture(scope="module", params=["text", "special", "added"])
def tokenizer(request):
    tokens = sorted({text for row in FORMATS for text in row.tokens})
    return make_tokenizer(**({} if request.param == "text" else {request.param: tokens}))


def grammar_of(name, tokenizer, *, required=False, parallel=True, schemas=None):
    format_ = BY_NAME[name]
    tools = make_tools(format_) if schemas is None else make_tools(format_, schemas)
    lowered = [lower_tool(format_, tool)[0] for tool in tools]
    return calls_grammar(format_, lowered, tokenizer, required=required, parallel=parallel)


@pytest.mark.parametrize("name", NAMES)
def test_text_and_calls_may_follow_if_none_is_required(name, tokenizer):
    grammar = grammar_of(name, tokenizer)

    assert follows(grammar, tokenizer, TEXTS[name]) is True
    assert follows(grammar, tokenizer, "Hi <there> [you]") is True
    assert follows(grammar, tokenizer, "") is True
    if BY_NAME[name].marker:
        assert follows(grammar, tokenizer, "Hi " + TEXTS[name]) is True
    assert not follows(grammar, tokenizer, TEXTS[name].replace("weather", "whether"))
    assert not follows(grammar, tokenizer, TEXTS[name].replace("3", "0"))


@pytest.mark.parametrize("name", NAMES)
def test_a_required_call_comes_first(name, tokenizer):
    grammar = grammar_of(name, tokenizer, required=True)

    assert follows(grammar, tokenizer, TEXTS[name]) is True
    assert follows(grammar, tokenizer, "Hi") is False
    assert follows(grammar, tokenizer, "") is None


@pytest.mark.parametrize("name", NAMES)
def test_without_parallel_calls_there_is_one(name, tokenizer):
    grammar = grammar_of(name, tokenizer, required=True, parallel=False)
    format_ = BY_NAME[name]
    one = format_.marker + format_.opening + format_.head_of("now")
    one += ("{}" if format_.arguments == "json" else "") + format_.tail + format_.closing

    assert follows(grammar, tokenizer, one) is True
    assert follows(grammar, tokenizer, TEXTS[name]) is False


@pytest.mark.parametrize(
    ("value", "allowed"), [("", False), ("a", True), ("a\nb", True), ("abcd", False)]
)
def test_text_parameters_obey_their_lengths(value, allowed, tokenizer):
    schemas = {"f": {"properties": {"a": {"type": "string", "minLength": 1, "maxLength": 3}}}}
    grammar = grammar_of("qwen3-coder", tokenizer, schemas=schemas)
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"

    assert (follows(grammar, tokenizer, text) is True) == allowed


def test_references_of_parameters_are_followed(tokenizer):
    schemas = {
        "f": {
            "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#/$defs/B"}},
            "required": ["a", "b"],
            "$defs": {
                "A": {"type": "string"},
                "B": {"type": "array", "items": {"$ref": "#/$defs/C"}},
                "C": {"enum": [1]},
            },
        }
    }
    grammar = grammar_of("qwen3-coder", tokenizer, schemas=schemas)
    text = (
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n[1, 1]\n</parameter>\n"
        "</function>\n</tool_call>"
    )

    assert follows(grammar, tokenizer, text) is True
    parser = CallParser(BY_NAME["qwen3-coder"], make_tools(BY_NAME["qwen3-coder"], schemas))
    assert parser.push(text).calls[0].arguments == '{"a": "x", "b": [1, 1]}'


@pytest.mark.parametrize(
    ("name", "schema", "message"),
    [
        ("hermes", {"type": "string"}, "must be `object`"),
        ("qwen3-coder", {"properties": {"a>": {}}}, "the names in `properties`"),
        ("qwen3-coder", {"required": 5}, "`required` a list"),
        ("qwen3-coder", {"properties": 1}, "must be an object"),
        ("qwen3-coder", {"properties": {"a": {"type": "string", "maxLength": "x"}}}, "`maxLength`"),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_written_are_refused(name, schema, message):
    with pytest.raises(GrammarError, match=message):
        lower_tool(BY_NAME[name], make_tool(BY_NAME[name], "f", schema))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "^a+$"}, "aa", "ab"),
        ({"type": "string", "format": "date", "maxLength": 10}, "2024-02-01", "2024-02-31"),
        ({"$ref": "#/$defs/A"}, "x", "y"),
        ({"type": "string", "format": "unheard-of", "x-note": 1}, "x", None),
        ({"type": "string", "minLength": 2, "allOf": [{"pattern": "b$"}]}, "ab", "b"),
    ],
)
def test_text_parameters_obey_every_keyword(schema, good, bad, tokenizer):
    schema = {
        "patternProperties": {},
        "properties": {"a": schema},
        "$defs": {"A": {"type": "string", "enum": ["x"]}},
    }
    grammar = grammar_of("qwen3-coder", tokenizer, schemas={"f": schema})

    def call(value):
        return f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"

    assert follows(grammar, tokenizer, call(good)) is True
    assert bad is None or not follows(grammar, tokenizer, call(bad))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<tool_call>{{ x }}</tool_call>", "hermes"),
        ("<tool_call><function=x>", "qwen3-coder"),
        ("<|python_tag|>", "llama3"),
        ('<|start_header_id|> "parameters"', "llama3"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]a[ARGS]", "mistral-args"),
        ("", "hermes"),
    ],
)
def test_the_format_is_found_in_the_template(template, expected):
    assert find_format("auto", ["x", template], make_tokenizer()).name == expected
    assert find_format("llama3", [template], make_tokenizer()).name == "llama3"


def test_the_vocabulary_tells_the_formats_of_mistral_apart():
    assert find_format("auto", ["[TOOL_CALLS]"], make_tokenizer(["[ARGS]"])).name == "mistral-args"


KEYS = [
    "type",
    "properties",
    "required",
    "enum",
    "const",
    "$ref",
    "$defs",
    "minLength",
    "x-guidance",
    "a",
]
VALUES = st.recursive(
    st.sampled_from(
        [None, True, 1, -1, 1.5, "string", "object", "#/$defs/a", "a", "\n</parameter>\n"]
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
@given(properties=VALUES, others=st.dictionaries(st.sampled_from(KEYS[2:]), VALUES, max_size=3))
def test_any_definition_has_a_grammar_or_is_refused(name, properties, others):
    format_, tokenizer = BY_NAME[name], make_tokenizer()

    with contextlib.suppress(GrammarError):
        tool = make_tool(format_, "f", {"properties": properties, **others})
        assert calls_grammar(format_, [tool], tokenizer, required=False, parallel=True)
