"""Constraints on the text: which fields state them, and that they reach the engine as a grammar."""

import pytest

from server.http.dialects.openai import options
from server.http.text.grammar_compiler import Constraint
from server.http.text.structured_output import CompiledConstraint, StructuredOutput

pytestmark = pytest.mark.anyio

TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<"],
}
SCHEMA = {"type": "object"}


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
    ],
)  # fmt: skip
async def test_every_field_states_its_constraint(complete, engine, compiled, fields, expected):
    response = await complete(**fields)

    assert response.status_code == 200, response.text
    assert compiled == [StructuredOutput(*expected)]
    assert engine.requests[0].sampling.grammar == f"grammar of {expected[0]}"


async def test_text_needs_no_grammar(complete, engine, compiled):
    await complete(response_format={"type": "text"}, structured_outputs={"json_object": False})

    assert compiled == []
    assert engine.requests[0].sampling.grammar is None


async def test_unknown_fields_of_a_constraint_are_warnings(complete, compiled):
    reply = (await complete(structured_outputs={"regex": "a", "whitespace_pattern": " "})).json()

    assert reply["warnings"] == [
        "`structured_outputs.whitespace_pattern` is unknown and has no effect"
    ]
