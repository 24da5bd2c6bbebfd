"""What the generators of schemas write is accepted, as a response format and as parameters of tools in every format.

`generated/*.jsonl` has their schemas: `zod.mjs` and `pydantic_types.py` beside them wrote these, `other.jsonl` is by
hand, in the style of generators for Kotlin, Java, Go and OpenAPI.
"""

import json
import random
from pathlib import Path

import jsonschema
import pytest

from benchmarks.structured_output import Walker
from model.hub.resolve import resolve
from model.sampling.grammar import GrammarTokenizer, compile_constraint, compile_matcher
from model.text.outputs import violations
from model.text.tokenizer import Tokenizer
from model.text.tools.formats import BY_NAME
from model.text.tools.parser import CallParser
from model.text.tools.translate import ToolsConstraint
from tests.model.text.schema.schema_maker import outputs

FOLDER = Path(__file__).parent / "generated"
FILES = ["zod", "pydantic", "other"]
NOTHING_FOLLOWS = ("never", "Never")  # types without values


def rows(name):
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(resolve("bundled"))


@pytest.fixture(scope="module")
def walker(tokenizer):
    return Walker(tokenizer, GrammarTokenizer(tokenizer, 4096, [0]), seed=0)


def is_empty(row):
    return row["type"].split()[0] in NOTHING_FOLLOWS


def is_openapi(row):
    """Return whether `jsonschema` does not know what the schema means."""
    return "openapi" in row["type"] or "OpenAPI" in row["generator"]


def check_rows(walker, chosen, walks):
    refused, wrong, unenforced, values = [], [], set(), 0
    for row in chosen:
        found, documents = outputs(walker, row["schema"], 1, walks)
        if found is None:
            if not is_empty(row):
                refused.append((row["generator"], row["type"], documents))
            continue
        if found.unenforced:
            unenforced.add((row["type"].split()[0], found.unenforced))
            continue
        if is_openapi(row):
            continue
        schema = json.loads(json.dumps(row["schema"]).replace(', "required": null', ""))
        older = '"items": [' in json.dumps(schema)
        default = jsonschema.Draft7Validator if older else jsonschema.Draft202012Validator
        checker = jsonschema.validators.validator_for(schema, default)(schema)
        for document in documents:
            values += 1
            if not checker.is_valid(document):
                wrong.append((row["generator"], row["type"], document))
    assert refused == []
    assert wrong == []
    return unenforced, values


@pytest.mark.parametrize("name", FILES)
def test_some_types_of_each_generator_are_accepted_and_their_values_are_valid(walker, name):
    found = rows(name)
    chosen = random.Random(3).sample(found, min(len(found), 20))

    check_rows(walker, chosen, walks=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FILES)
def test_every_type_is_accepted_and_its_values_are_valid_or_announced(walker, name):
    unenforced, values = check_rows(walker, rows(name), walks=4)

    assert values > 20
    kinds = {kind for kind, _ in unenforced}
    assert kinds <= UNENFORCED[name], kinds - UNENFORCED[name]


# Types with keywords that no grammar enforces.
UNENFORCED = {
    "zod": {"emoji", "hostname", "step", "Unique", "Contains"},
    "pydantic": {"set[int]", "frozenset[str]", "conset", "float", "dict[constr,"},
    "other": {"set"},
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("format_name", ["hermes", "qwen3-coder"])
@pytest.mark.parametrize("name", FILES)
def test_every_type_is_accepted_as_parameters_of_a_tool(tokenizer, walker, name, format_name):
    refused, wrong, num_calls = [], [], 0
    for row in rows(name):
        if is_empty(row):
            continue
        value = ToolsConstraint(format_name, [("f", row["schema"], False)], True, False)
        try:
            found = compile_constraint(walker.vocabulary, "tools", value, text_tokenizer=tokenizer)
        except Exception as error:  # noqa: BLE001 - collected
            refused.append((row["generator"], row["type"], str(error)))
            continue
        walker.reseed(1)
        matcher = compile_matcher(walker.vocabulary, found.grammar)
        texts = [walker.walk(matcher.copy(), 250) for _ in range(2)]
        for text in filter(None, texts):
            parser = CallParser(BY_NAME[format_name], value.read())
            parser.push(text)
            parser.finish()
            assert parser.call_complete, text
            num_calls += 1
            if not found.unenforced and violations("tools", value, text):
                wrong.append(
                    (row["generator"], row["type"], text, violations("tools", value, text))
                )

    assert refused == []
    assert wrong == []
    assert num_calls > 10
