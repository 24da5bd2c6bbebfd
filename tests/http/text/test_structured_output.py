"""Constraints of requests: what reaches the engine, what is refused, and hostile constraints."""

import asyncio
import json
import shutil

import pytest

from server.errors import OverloadedError, UnavailableError, ValidationError
from server.http.load.admission import Admission
from server.http.text import grammar_compiler
from server.http.text.grammar_compiler import GrammarCompiler
from server.http.text.structured_output import StructuredOutput, compile_grammar
from tests.http.conftest import CONFIG

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Context:
    """What `compile_grammar` uses of `AppContext`."""

    def __init__(self, folder, vocab_size=260):
        self.grammars = GrammarCompiler(str(folder), (256,))
        self.admission = Admission(CONFIG, None, None)
        self._vocab_size = vocab_size

    def engine_info(self):
        return self

    @property
    def vocab_size(self):
        return self._vocab_size


@pytest.fixture
async def context(tokenizer, anyio_backend):
    found = Context(tokenizer.folder)
    yield found
    found.grammars.close()


async def compiled(context, kind, value, field="grammar", strict=False):
    return await compile_grammar(context, StructuredOutput(kind, value, field, strict))


async def refusal(context, kind, value, strict=True):
    with pytest.raises(ValidationError) as error:
        await compiled(context, kind, value, "the_field", strict)
    prefix = "Input validation error: `the_field`: "
    assert error.value.message.startswith(prefix)
    return error.value.message.removeprefix(prefix)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", SCHEMA),
        ("json_schema", json.dumps(SCHEMA)),
        ("json_object", None),
        ("regex", "[a-z]+"),
        ("choice", ["yes", "no"]),
        ("lark", 'start: "a" | "b"'),
        (
            "structural_tag",
            {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]},
        ),
    ],
)
async def test_every_kind_of_constraint_becomes_a_grammar(context, kind, value):
    assert await compiled(context, kind, value)


async def test_an_equal_constraint_is_compiled_once(context, monkeypatch):
    first = await compiled(context, "json_schema", SCHEMA)
    monkeypatch.setattr(context.grammars, "_run", None)

    assert await compiled(context, "json_schema", dict(SCHEMA)) == first


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def references(count):
    chain = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(count)
    }
    return {"$ref": "#/$defs/a0", "$defs": chain | {f"a{count}": {"type": "string"}}}


HOSTILE = {
    "deep": ("json_schema", nested(100)),
    "a chain of references": ("json_schema", references(2000)),
    "a loop of references": (
        "json_schema",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ),
    "a remote reference": ("json_schema", {"$ref": "http://localhost/schema.json"}),
    "2 MB": ("json_schema", {"enum": ["x" * 2_000_000]}),
    "a long pattern": ("regex", "ab" * 100_000),
    "an enormous enum": ("json_schema", {"enum": [f"value {i}" for i in range(20_000)]}),
    "exponentially many alternatives": (
        "json_schema",
        {
            "allOf": [
                {"anyOf": [{"properties": {f"{k}{i}": {"type": "null"}}} for k in "ab"]}
                for i in range(20)
            ]
        },
    ),
    "an intersection of counted patterns": (
        "json_schema",
        {"type": "string", "allOf": [{"pattern": f"^.*a.{{{i}}}b"} for i in range(1, 40)]},
    ),
    "repetitions of repetitions": ("regex", "((x{1000}){1000}){1000}"),
    "thousands of optional properties": (
        "json_schema",
        {"properties": {f"p{i}": {} for i in range(4000)}, "additionalProperties": False},
    ),
    "brackets": ("lark", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "a chain of rules": (
        "lark",
        "start: r0\n" + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(4000)) + 'r4000: "b"\n',
    ),
    "terminals that double": (
        "lark",
        "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "b"\n',
    ),
    "nothing": ("regex", r"[^\s\S]"),
    "false": ("json_schema", {"allOf": [False]}),
}


async def test_hostile_constraints_are_refused_while_the_event_loop_goes_on(context):
    await compiled(context, "choice", ["the workers have started"])
    passes = 0

    async def watch():
        nonlocal passes
        while True:
            await asyncio.sleep(0.005)
            passes += 1

    watching = asyncio.create_task(watch())
    verdicts = {
        name: await refusal(context, kind, value) for name, (kind, value) in HOSTILE.items()
    }
    watching.cancel()

    assert all(len(text) < 400 for text in verdicts.values()), verdicts
    assert passes >= 50  # one of them takes 2 s of processor time, which this process would spend
    assert await compiled(context, "json_schema", SCHEMA)


async def test_an_honest_constraint_is_compiled_beside_a_hostile_one(context):
    await compiled(context, "choice", ["a worker has started"])
    hostile = asyncio.create_task(refusal(context, *HOSTILE["an intersection of counted patterns"]))
    await asyncio.sleep(0.1)

    assert await compiled(context, "json_schema", SCHEMA)
    assert not hostile.done()
    assert "2 seconds" in await hostile


async def test_a_constraint_that_waits_too_long_for_a_worker_is_refused_as_overload(
    context, monkeypatch
):
    monkeypatch.setattr(grammar_compiler, "_QUEUE_SECONDS", 0.05)
    monkeypatch.setattr(grammar_compiler, "SECONDS", 0.5)
    hostile = [
        asyncio.create_task(
            refusal(
                context,
                "json_schema",
                HOSTILE["an intersection of counted patterns"][1] | {"title": str(i)},
            )
        )
        for i in range(2)
    ]
    await asyncio.sleep(0.1)

    with pytest.raises(OverloadedError):
        await compiled(context, "json_schema", SCHEMA)
    await asyncio.gather(*hostile)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"minimum": 1}}, "`not`"),
        ({"type": "array", "uniqueItems": True}, "`uniqueItems`"),
        ({"if": {"minimum": 1}, "then": {"maximum": 5}}, "`if`"),
        ({"properties": {"a": {"contains": {}}}}, "`/properties/a/contains`"),
        ({"x-guidance": {"lenient": True}}, "`x-guidance`"),
    ],
)
async def test_keywords_that_are_not_supported_are_refused_by_name_if_strict(
    context, schema, keyword
):
    assert keyword in await refusal(context, "json_schema", schema)


async def test_keywords_that_are_not_supported_are_warnings_if_not_strict(context):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}

    found = await compiled(context, "json_schema", schema, "the_field")

    assert found.warnings == ("`the_field`: the grammar does not enforce `/uniqueItems`",)
    assert await found.violations(context, ["[1, 2]", "[1, 2"]) == ()
    assert await found.violations(context, ["[1, 1]"]) == (
        "the value does not match the schema: `uniqueItems` at `/`",
    )


async def test_a_check_that_takes_too_long_is_a_warning(context, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "SECONDS", 0.5)
    schema = {"type": "string", "pattern": "^(?=(a|aa)+$)(?!b).*x$"}
    found = await compiled(context, "json_schema", schema, "the_field")

    assert "could not be checked" in (await found.violations(context, [f'"{"a" * 60}c"']))[0]


async def test_descriptions_do_not_count_as_grammar(context):
    schema = {"description": "x" * 1_000_000, "properties": {"a": {"title": "x" * 200_000}}}

    assert not (await compiled(context, "json_schema", schema)).warnings


async def test_a_tokenizer_that_cannot_be_read_is_no_fault_of_the_constraint(tmp_path, tokenizer):
    context = Context(tmp_path)
    with pytest.raises(UnavailableError) as error:
        await compiled(context, "json_schema", SCHEMA)
    assert error.value.retry_after
    assert str(tmp_path) not in error.value.message

    shutil.copytree(tokenizer.folder, tmp_path, dirs_exist_ok=True)
    assert await compiled(context, "json_schema", SCHEMA)
    context.grammars.close()


async def test_a_tokenizer_of_another_kind_refuses_every_constraint_by_name(tmp_path, tokenizer):
    shutil.copytree(tokenizer.folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    document = json.loads(file.read_text())
    document["decoder"] = {
        "type": "CTC",
        "pad_token": "a",
        "word_delimiter_token": "b",
        "cleanup": True,
    }
    file.write_text(json.dumps(document))
    context = Context(tmp_path)

    for value in ("[a-z]", "[0-9]"):
        assert "this model's tokenizer" in await refusal(context, "regex", value)
    context.grammars.close()


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_schema", "value": {"name": "answer", "schema": SCHEMA}},
        {"type": "regex", "value": "[0-9]+"},
    ],
    ids=lambda grammar: grammar["type"],
)
async def test_the_grammar_of_a_tgi_request_reaches_the_engine(client, engine, grammar):
    reply = await client.post("/generate", json={"inputs": "x", "parameters": {"grammar": grammar}})

    assert reply.status_code == 200, reply.text
    assert engine.requests[-1].sampling.grammar is not None


async def test_a_tgi_request_without_a_grammar_has_none(client, engine):
    await client.post("/generate", json={"inputs": "x", "parameters": {"grammar": None}})

    assert engine.requests[-1].sampling.grammar is None
