"""Constraints on the text: which fields state them, and that they reach the engine as a grammar."""

import pytest

from server.engine.core.request import FinishReason
from server.http.dialects.openai import options
from server.http.text.grammar_compiler import Constraint
from server.http.text.structured_output import CompiledConstraint, StructuredOutput
from tests.http.fakes import say

pytestmark = pytest.mark.anyio

TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<"],
}
SCHEMA = {"type": "object"}
OPEN = {
    "type": "object",
    "properties": {
        "a": {"properties": {"b": {}}, "additionalProperties": True},
        "c": {"anyOf": [{"properties": {}}, {"const": {"properties": 1}}, {"type": "object"}]},
    },
}
CLOSED = OPEN | {
    "properties": {
        "a": OPEN["properties"]["a"],
        "c": {
            "anyOf": [
                {"properties": {}, "additionalProperties": False},
                {"const": {"properties": 1}},
                {"type": "object"},
            ]
        },
    },
    "additionalProperties": False,
}


@pytest.fixture
def compiled(monkeypatch):
    """Replaces the compiler; collects the constraints it was given."""
    found = []

    async def compile_grammar(_context, wanted):
        found.append(wanted)
        constraint = Constraint(wanted.kind, wanted.value)
        return CompiledConstraint(f"grammar of {wanted.kind}", constraint)

    monkeypatch.setattr(options, "compile_grammar", compile_grammar)
    return found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, ("json_object", None, "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            ("json_schema", SCHEMA, "response_format.json_schema.schema"),
        ),
        (
            {"response_format": {"type": "json", "value": SCHEMA}},
            ("json_schema", SCHEMA, "response_format.value"),
        ),
        (
            {"response_format": {"type": "regex", "value": "a+"}},
            ("regex", "a+", "response_format.value"),
        ),
        (
            {"response_format": TAG},
            ("structural_tag", TAG, "response_format"),
        ),
        (
            {"structured_outputs": {"json": '{"type": "object"}'}},
            ("json_schema", SCHEMA, "structured_outputs.json"),
        ),
        ({"structured_outputs": {"regex": "a"}}, ("regex", "a", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, ("choice", ["a"], "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "g"}}, ("lark", "g", "structured_outputs.grammar")),
        (
            {"structured_outputs": {"json_object": True}},
            ("json_object", None, "structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            ("structural_tag", {}, "structured_outputs.structural_tag"),
        ),
        ({"guided_json": SCHEMA}, ("json_schema", SCHEMA, "guided_json")),
        ({"guided_regex": "a"}, ("regex", "a", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, ("choice", ["a", "b"], "guided_choice")),
        ({"guided_grammar": "g"}, ("lark", "g", "guided_grammar")),
        ({"nvext": {"guided_json": SCHEMA}}, ("json_schema", SCHEMA, "nvext.guided_json")),
        ({"nvext": {"guided_choice": ["a"]}}, ("choice", ["a"], "nvext.guided_choice")),
        ({"json_schema": SCHEMA}, ("json_schema", SCHEMA, "json_schema")),
        ({"json_schema": '{"type": "object"}'}, ("json_schema", SCHEMA, "json_schema")),
        ({"json_schema": {}}, ("json_schema", {}, "json_schema")),
        ({"json_schema": True}, ("json_schema", True, "json_schema")),
        ({"regex": "a"}, ("regex", "a", "regex")),
        ({"ebnf": 'root ::= "a"'}, ("lark", 'root ::= "a"', "ebnf")),
        ({"grammar": 'root ::= "a"'}, ("lark", 'root ::= "a"', "grammar")),
        ({"grammar": {"type": "regex", "value": "a"}}, ("regex", "a", "grammar.value")),
        ({"grammar": {"type": "json", "value": SCHEMA}}, ("json_schema", SCHEMA, "grammar.value")),
        ({"format": "json"}, ("json_object", None, "format")),
        ({"format": SCHEMA}, ("json_schema", SCHEMA, "format")),
        ({"structural_tag": TAG}, ("structural_tag", TAG, "structural_tag")),
        ({"structural_tag": "{}"}, ("structural_tag", {}, "structural_tag")),
        ({"regex_pattern": "a"}, ("regex", "a", "regex")),
        ({"grammar_string": "g"}, ("lark", "g", "grammar")),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}},
            ("json_schema", SCHEMA, "response_format.schema"),
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            ("json_schema", SCHEMA, "response_format.schema"),
        ),
        (
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            ("json_schema", SCHEMA, "response_format.value"),
        ),
        (
            {"response_format": {"type": "json", "schema": SCHEMA}},
            ("json_schema", SCHEMA, "response_format.schema"),
        ),
        (
            {"response_format": {"type": "json", "value": '{"type": "object"}'}},
            ("json_schema", SCHEMA, "response_format.value"),
        ),
        (
            {"response_format": {"type": "json_schema", "value": SCHEMA}},
            ("json_schema", SCHEMA, "response_format.value"),
        ),
        (
            {"response_format": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}},
            ("json_schema", SCHEMA, "response_format.value.schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}},
            ("json_schema", SCHEMA, "response_format.schema", True),
        ),
        (
            {"response_format": {"type": "regex", "pattern": "a+"}},
            ("regex", "a+", "response_format.pattern"),
        ),
        (
            {"response_format": {"type": "regex", "regex": "a+"}},
            ("regex", "a+", "response_format.regex"),
        ),
        (
            {"response_format": {"type": "regex", "regex": {"regex": "a+"}}},
            ("regex", "a+", "response_format.regex.regex"),
        ),
        (
            {"response_format": {"type": "regex_schema", "regex_schema": "a+"}},
            ("regex", "a+", "response_format.regex_schema"),
        ),
        (
            {"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}},
            ("lark", 'root ::= "a"', "response_format.grammar"),
        ),
        (
            {"response_format": {"type": "ebnf", "ebnf": 'root ::= "a"'}},
            ("lark", 'root ::= "a"', "response_format.ebnf"),
        ),
        (
            {"structured_outputs": {"json": OPEN, "disable_additional_properties": True}},
            ("json_schema", CLOSED, "structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": r"[\n ]*"}},
            ("json_schema", SCHEMA, "structured_outputs.json"),
        ),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            ("json_schema", SCHEMA, "guided_json"),
        ),
        (
            {"guided_json": SCHEMA, "response_format": {"type": "json_object", "schema": SCHEMA}},
            ("json_schema", SCHEMA, "response_format.schema"),
        ),
        (
            {"regex": "a", "grammar": "", "format": "", "guided_regex": "a"},
            ("regex", "a", "guided_regex"),
        ),
    ],
)  # fmt: skip
async def test_every_field_states_its_constraint(complete, engine, compiled, fields, expected):
    response = await complete(**fields)

    assert response.status_code == 200, response.text
    assert compiled == [StructuredOutput(*expected)]
    assert "warnings" not in response.json()
    assert engine.requests[0].sampling.grammar == f"grammar of {expected[0]}"


async def test_text_needs_no_grammar(complete, engine, compiled):
    await complete(response_format={"type": "text"}, structured_outputs={"json_object": False})

    assert compiled == []
    assert engine.requests[0].sampling.grammar is None


async def test_unknown_fields_of_a_constraint_are_warnings(complete, compiled):
    reply = (await complete(structured_outputs={"regex": "a", "whitespace_pattern": " "})).json()

    assert reply["warnings"] == ["`structured_outputs.whitespace_pattern` has no effect"]


async def test_unknown_fields_of_a_constraint_have_no_effect(complete, compiled):
    outputs = {"regex": "a", "colour": " ", "disable_fallback": True}

    reply = (await complete(structured_outputs=outputs)).json()

    assert reply["warnings"] == [
        "`structured_outputs.colour` is unknown and has no effect",
        "`structured_outputs.disable_fallback` has no effect",
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"regex": "a"}, "regex"),
        ({"ebnf": "g"}, "ebnf"),
        ({"grammar": "g"}, "grammar"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"format": "json"}, "format"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
    ],
)
async def test_every_route_knows_every_field(client, templates, compiled, fields, field):
    bodies = {
        "completions": {"prompt": "a"},
        "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "responses": {"input": "a"},
    }
    for path, body in bodies.items():
        response = await client.post(f"/v1/{path}", json=body | fields)
        assert response.status_code == 200, response.text

    assert [constraint.field for constraint in compiled] == [field] * 3


@pytest.mark.parametrize("format_", [
    {"type": "json_object", "schema": SCHEMA},
    {"type": "json_schema", "name": "x", "schema": SCHEMA},
    {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    {"type": "json", "value": SCHEMA},
])  # fmt: skip
async def test_the_format_of_a_response_has_the_same_forms(client, templates, compiled, format_):
    response = await client.post("/v1/responses", json={"input": "a", "text": {"format": format_}})

    assert response.status_code == 200, response.text
    assert [(c.kind, c.value) for c in compiled] == [("json_schema", SCHEMA)]
    assert response.json()["text"]["format"] == format_


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a", "ebnf": "g"}, "`regex` and `ebnf` exclude each other"),
        (
            {"json_schema": SCHEMA, "format": {"type": "array"}},
            "`json_schema` and `format` exclude each other",
        ),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "exclude each other"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": {}}},
            "`response_format.json_schema.schema` and `response_format.schema` exclude each other",
        ),
        ({"grammar": {"type": "regex", "value": "a", "pattern": "b"}}, "`grammar.value` and `grammar.pattern` exclude"),
        ({"json_schema": {"const": 1}, "format": {"const": True}}, "`json_schema` and `format` exclude each other"),
        ({"regex": "a", "regex_pattern": "b"}, "`regex` and `regex_pattern` exclude each other"),
        ({"structural_tag": "{"}, "`structural_tag` must be JSON"),
        ({"regex": 1}, "`regex` must be a string"),
        ({"grammar": 1}, "`grammar` must be an object or a string"),
        ({"grammar": {"type": "x"}}, "`grammar.type` must be one of text, json_object"),
        ({"grammar": {"value": "x"}}, "`grammar.type` must be one of"),
        ({"format": "yaml"}, "`format` must be JSON, but cannot be decoded"),
        ({"json_schema": "{"}, "`json_schema` must be JSON, but cannot be decoded"),
        ({"response_format": {"type": "regex"}}, "`response_format.value` is required"),
        ({"response_format": {"type": "regex", "value": {}}}, "`response_format.value` must be a string"),
        ({"response_format": {"type": "ebnf"}}, "`response_format.ebnf` is required"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "`response_format.schema` needs another `type`"),
        ({"response_format": {"type": "regex", "value": "a", "schema": SCHEMA}}, "`response_format.schema` needs"),
        ({"response_format": {"type": "json_object", "schema": 1}}, "`response_format.schema` must be a JSON schema"),
        ({"response_format": {"type": "yaml"}}, "`response_format.type` must be"),
        (
            {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": ""},
            "`guided_whitespace_pattern` must match a space and nothing",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "("}},
            "`structured_outputs.whitespace_pattern` must match a space and nothing",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?" * 51}},
            "at most 100 characters",
        ),
        *[
            ({name: value}, f"`{name}` is not supported")
            for name, value in (
                ("allowed_token_ids", [1]), ("stop_regex", "a+"), ("logits_processors", ["x"]), ("n_indent", 4),
                ("grammar_lazy", True), ("template", "{{ .Prompt }}"), ("lora_path", "x"), ("input_ids", [1]),
                ("guided_json_object", True), ("guided_decoding", {"regex": "a"}),
            )
        ],
        ({"n_predict": 5, "max_tokens": 6}, "`max_tokens` and `n_predict` exclude each other"),
        ({"stop_sequences": ["a"], "stop": ["b"]}, "`stop` and `stop_sequences` exclude each other"),
    ],
)  # fmt: skip
async def test_what_cannot_be_enforced_is_refused(complete, engine, fields, message):
    response = await complete(**fields)

    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [], "stop_regex": None, "logits_processors": [], "n_indent": 0},
        {
            "n_predict": -1,
            "grammar_lazy": False,
            "template": "",
            "grammar_string": "",
            "guided_json_object": False,
        },
        {"regex": None, "grammar": None, "format": None, "json_schema": None, "ebnf": None},
    ],
)
async def test_values_that_ask_for_nothing_are_accepted(complete, compiled, fields):
    reply = (await complete(**fields)).json()

    assert "warnings" not in reply
    assert compiled == []


async def test_hints_are_warnings(complete):
    fields = {
        "guided_decoding_backend": "xgrammar", "n_probs": 3, "top_n_tokens": 2, "cache_prompt": False,
        "prediction": {"type": "content", "content": "a"}, "tool_prompt": "x",
    }  # fmt: skip

    reply = (await complete(**fields)).json()

    assert reply["warnings"] == [f"`{name}` has no effect" for name in fields]


async def test_other_names_of_fields_are_known(complete, engine, tokenizer):
    fields = {"n_predict": 3, "repeat_penalty": 1.5, "stop_sequences": ["x"], "max_tokens": 3}

    reply = (await complete(**fields)).json()

    (request,) = engine.requests
    assert (request.sampling.max_new_tokens, request.sampling.repetition_penalty) == (3, 1.5)
    assert "warnings" not in reply


async def test_a_stop_sequence_ends_the_text(complete, engine, tokenizer):
    engine.script = say(tokenizer.encode("one two"), FinishReason.LENGTH)

    reply = (await complete(stop_sequences=["two"])).json()

    assert reply["choices"][0]["text"] == "one "
