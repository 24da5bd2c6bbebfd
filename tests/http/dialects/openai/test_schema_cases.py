"""Schemas of generators and constraints that the library of grammars gets wrong, as requests send them."""

import json

import msgspec
import pytest

from model.text.chat_template import ChatTemplate
from tests.http.fakes import INFO

pytestmark = pytest.mark.anyio

PAIR = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}


def closed(a, **fields):
    return {
        "type": "object",
        "properties": {"a": a},
        "required": ["a"],
        "additionalProperties": False,
        **fields,
    }


GENERATED = {
    "names of any kind": closed(
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}
    ),
    "not unique": closed({"type": "array", "items": {"type": "string"}, "uniqueItems": False}),
    "int64": closed({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
    "uint64": closed({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}),
    "float32": closed({"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38}),
    "float64": closed({"type": "number", "exclusiveMaximum": 1.7976931348623157e308}),
    "oneOf through a reference": closed(
        {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 500}, {"$ref": "#/$defs/L"}]},
        **{"$defs": {"L": PAIR}},
    ),
    "required is null": {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": None,
    },
    "everything is null": {
        "type": "object",
        "properties": None,
        "required": None,
        "enum": None,
        "title": None,
    },
    "an unknown format": closed(
        {"type": "string", "format": "binary", "contentEncoding": "base64"}
    ),
    "an integer's format": closed({"type": "integer", "format": "int32"}),
    "a reference with brackets": closed(
        {"$ref": "#/$defs/Box[int]"}, **{"$defs": {"Box[int]": PAIR}}
    ),
    "an escaped reference": closed({"$ref": "#/$defs/a~1b%20c"}, **{"$defs": {"a/b c": PAIR}}),
    "an anchor": closed({"$ref": "#pair"}, **{"$defs": {"x": {"$anchor": "pair", **PAIR}}}),
    "another draft": closed(
        {"$ref": "#/definitions/L", "description": "x"},
        **{"$schema": "http://json-schema.org/draft-04/schema#", "definitions": {"L": PAIR}},
    ),
    "no properties needed": closed({"type": "object", "minProperties": 0}),
    "a draft 4 bound": closed({"type": "number", "minimum": 0, "exclusiveMinimum": True}),
    "OpenAPI's null": closed(
        {"type": "string", "nullable": True, "example": "x", "discriminator": {}}
    ),
    "a list of items": closed(
        {"type": "array", "items": [{"type": "null"}], "additionalItems": False}
    ),
    "nothing contained": closed({"type": "array", "contains": {"const": 1}, "minContains": 0}),
}


@pytest.fixture(autouse=True)
def large_context(engine):
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096, max_total_tokens=4096)


@pytest.fixture
async def ask(open_client, tokenizer):
    template = ChatTemplate({"default": "{{ tools }}{{ messages[0].content }}"}, tokenizer)

    clients = {}

    async def post(path="/v1/chat/completions", tool_call_format="hermes", **fields):
        if tool_call_format not in clients:
            clients[tool_call_format] = await open_client(
                chat_template=template, tool_call_format=tool_call_format
            )
        body = {"max_tokens": 2, **fields}
        if "chat" in path:
            body["messages"] = [{"role": "user", "content": "x"}]
        return await clients[tool_call_format].post(path, json=body)

    return post


@pytest.mark.parametrize("place", ["response_format", "hermes", "qwen3-coder"])
async def test_what_generators_write_is_enforced_as_a_whole(ask, place):
    for name, schema in GENERATED.items():
        if place == "response_format":
            named = {"name": "x", "schema": schema, "strict": True}
            reply = await ask(response_format={"type": "json_schema", "json_schema": named})
        else:
            function = {"name": "f", "parameters": schema, "strict": True}
            tools = [{"type": "function", "function": function}]
            reply = await ask(tools=tools, tool_call_format=place)

        assert reply.status_code == 200, (name, reply.text)
        assert "warnings" not in reply.json(), name


async def test_texts_of_qwen3_coder_have_every_keyword(ask):
    schema = {
        "type": "string",
        "format": "uri",
        "pattern": "a",
        "minLength": 3,
        "title": "x",
        "allOf": [{"$ref": "#/$defs/A"}],
    }
    parameters = closed(schema, **{"$defs": {"A": {"pattern": "b"}}})
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    reply = await ask(tools=tools, tool_call_format="qwen3-coder")

    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("constraint", "status"),
    [
        ({"regex": "(ab|cd)\\"}, 400),
        ({"regex": "(ab|cd)\\\\"}, 200),
        ({"grammar": 'root ::= [\\u00e9] "a"'}, 200),
        ({"json": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.1}}, 200),
        ({"json": {"type": "string", "pattern": "^[\\u0000-\\u001f]$"}}, 200),
        ({"json": {"type": "string", "pattern": "("}}, 400),
    ],
)
async def test_what_the_library_gets_wrong_is_right_or_refused(ask, constraint, status):
    reply = await ask("/v1/completions", prompt="x", structured_outputs=constraint)

    assert reply.status_code == status, reply.text
    assert "warnings" not in reply.json()


async def test_128_tools_with_long_descriptions_are_accepted(ask, engine):
    limits = {"max_model_len": 1_000_000, "max_total_tokens": 1_000_000}
    engine.info = msgspec.structs.replace(engine.info, **limits)
    parameters = closed({"type": "string", "description": "x" * 4000})
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{i}", "parameters": parameters, "description": "x" * 10},
        }
        for i in range(128)
    ]
    assert len(json.dumps(tools)) > 500_000

    reply = await ask(tools=tools, tool_choice="required")

    assert reply.status_code == 200, reply.text[:300]
