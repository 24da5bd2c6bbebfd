"""Tools and a constraint on the text in one request: which grammar is submitted, and what warnings say."""

import httpx
import msgspec
import pytest

from model.sampling.grammar import GrammarTokenizer, compile_matcher
from model.text.chat_template import ChatTemplate
from model.text.tools.formats import FORMATS
from tests.http.dialects.openai.test_cut_off_calls import BODY, FLAT, TEMPLATE, TOOLS
from tests.http.fakes import INFO
from tests.model.text.tools.tool_cases import TEXTS

pytestmark = pytest.mark.anyio

NAMES = [row.name for row in FORMATS]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f"],
}
FIELDS = [
    ({"response_format": JSON_FORMAT}, '{"a": 2}'),
    ({"response_format": {"type": "json_object"}}, '{"b": [1]}'),
    ({"response_format": {"type": "regex", "value": "a+/b"}}, "aa/b"),
    ({"response_format": TAG}, 'see <f>{"a": 1}</f>'),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 2}'),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, "123"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x1"),
    ({"structured_outputs": {"json_object": True}}, "{}"),
    ({"guided_json": SCHEMA}, '{"a": 2}'),
    ({"guided_regex": "[0-9]{3}"}, "123"),
    ({"guided_choice": ["yes", "no"]}, "no"),
    ({"guided_grammar": 'start: "x" /[0-9]/'}, "x1"),
]


@pytest.fixture(autouse=True)
def large_context(engine):
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096, max_total_tokens=4096)


@pytest.fixture
async def open_format(make_app, tokenizer):
    """Opens a client of a service with a format of calls."""
    clients = []

    async def open_one(name):
        app = make_app(ChatTemplate({"default": TEMPLATE}, tokenizer), tool_call_format=name)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://test"))
        return clients[-1]

    yield open_one
    for client in clients:
        await client.aclose()


def follows(engine, tokenizer, text):
    library = GrammarTokenizer(tokenizer, INFO.vocab_size, (256,))
    matcher = compile_matcher(library, engine.requests[-1].sampling.grammar)
    return all(map(matcher.accept, tokenizer.encode(text))) and matcher.is_accepting


@pytest.mark.parametrize("name", NAMES)
async def test_the_message_is_calls_or_follows_the_constraint(open_format, engine, tokenizer, name):
    client = await open_format(name)
    for fields, value in FIELDS:
        response = await client.post("/v1/chat/completions", json=BODY | fields)
        assert response.status_code == 200, response.text
        assert "warnings" not in response.json()
        assert follows(engine, tokenizer, value), fields
        assert follows(engine, tokenizer, TEXTS[name]), fields
        assert not follows(engine, tokenizer, TEXTS[name].replace("3", "0")), fields
        if "response_format" not in fields or fields["response_format"] != TAG:
            assert not follows(engine, tokenizer, "free text"), fields


@pytest.mark.parametrize("name", NAMES)
async def test_a_response_is_calls_or_follows_the_format(open_format, engine, tokenizer, name):
    client = await open_format(name)
    for wanted, value in (
        ({"type": "json_schema", "name": "x", "schema": SCHEMA}, '{"a": 2}'),
        ({"type": "json_object"}, "{}"),
    ):
        body = {"input": "hi", "tools": FLAT, "text": {"format": wanted}}
        response = await client.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        assert follows(engine, tokenizer, value)
        assert follows(engine, tokenizer, TEXTS[name])
        assert not follows(engine, tokenizer, "free text")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_a_required_call_leaves_no_text_that_a_format_could_apply_to(
    open_format, engine, tokenizer, choice
):
    client = await open_format("hermes")

    response = await client.post(
        "/v1/chat/completions", json=BODY | {"response_format": JSON_FORMAT, "tool_choice": choice}
    )

    assert response.status_code == 200, response.text
    (warning,) = response.json()["warnings"]
    assert "`response_format" in warning
    assert "has no effect, since `tool_choice` requires a call" in warning
    assert not follows(engine, tokenizer, '{"a": 2}')


async def test_without_a_choice_of_tools_the_format_stands_alone(open_format, engine, tokenizer):
    client = await open_format("hermes")

    response = await client.post(
        "/v1/chat/completions", json=BODY | {"response_format": JSON_FORMAT, "tool_choice": "none"}
    )

    assert response.status_code == 200, response.text
    assert follows(engine, tokenizer, '{"a": 2}')
    assert not follows(engine, tokenizer, TEXTS["hermes"])


async def test_two_names_of_one_constraint_count_as_one(open_format, engine, tokenizer):
    client = await open_format("hermes")
    equal = {"response_format": JSON_FORMAT, "structured_outputs": {"json": SCHEMA}}
    other = {"response_format": JSON_FORMAT, "structured_outputs": {"json": {"type": "object"}}}

    for tools in ({}, {"tools": TOOLS}):
        body = {"messages": BODY["messages"], **tools}
        response = await client.post("/v1/chat/completions", json=body | equal)
        assert response.status_code == 200, response.text
        assert follows(engine, tokenizer, '{"a": 2}')
        response = await client.post("/v1/chat/completions", json=body | other)
        assert response.status_code == 400
        assert "exclude each other" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_regex": "(a"}, "`guided_regex`"),
        ({"response_format": {"type": "regex", "value": "(a"}}, "`response_format"),
        ({"guided_grammar": "start: b"}, "`guided_grammar`"),
    ],
)
async def test_a_constraint_that_is_not_valid_is_named(open_format, fields, field):
    client = await open_format("hermes")

    response = await client.post("/v1/chat/completions", json=BODY | fields)

    assert response.status_code == 400
    assert field in response.json()["error"]["message"]


async def test_what_a_grammar_does_not_enforce_of_a_format_is_said(open_format, engine, tokenizer):
    client = await open_format("hermes")
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    loose = await client.post("/v1/chat/completions", json=BODY | {"response_format": wanted})
    wanted["json_schema"]["strict"] = True
    strict = await client.post("/v1/chat/completions", json=BODY | {"response_format": wanted})

    assert loose.status_code == 200, loose.text
    assert "uniqueItems" in str(loose.json()["warnings"])
    assert follows(engine, tokenizer, "[1, 1]")
    assert strict.status_code == 400
    assert "uniqueItems" in strict.json()["error"]["message"]
