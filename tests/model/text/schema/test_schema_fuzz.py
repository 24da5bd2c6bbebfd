"""Values that follow the grammars of random schemas are valid, or keywords that are not enforced are announced."""

import random

import jsonschema
import pytest

from benchmarks.structured_output import Walker
from model.hub.resolve import resolve
from model.sampling.grammar import GrammarTokenizer
from model.text.tokenizer import Tokenizer
from tests.model.text.schema.schema_maker import SchemaMaker, outputs

# Schemas without any value, and references that consist of themselves.
REFUSALS = ("unsatisfiable", "no text follows", "a reference leads back to itself")


@pytest.fixture(scope="module")
def walker():
    tokenizer = Tokenizer.from_folder(resolve("bundled"))
    return Walker(tokenizer, GrammarTokenizer(tokenizer, 4096, [0]), seed=0)


def follow(walker, seeds):
    refused, invalid, num_valid, num_whole = [], [], 0, 0
    for seed in seeds:
        schema = SchemaMaker(random.Random(seed)).make()
        found, documents = outputs(walker, schema, seed, walks=3)
        if found is None:
            if not any(reason in documents.lower() for reason in REFUSALS):
                refused.append((seed, documents, schema))
            continue
        if found.unenforced:
            continue
        num_whole += 1
        checker = jsonschema.Draft202012Validator(schema)
        for document in documents:
            if checker.is_valid(document):
                num_valid += 1
            else:
                invalid.append((seed, document, schema))
    assert refused == []
    assert invalid == []
    return num_valid, num_whole


def test_values_of_some_random_schemas_are_valid_or_announced(walker):
    num_valid, _ = follow(walker, range(5000, 5020))

    assert num_valid > 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_values_of_1000_random_schemas_are_valid_or_announced(walker, part):
    num_valid, num_whole = follow(walker, range(250 * part, 250 * (part + 1)))

    assert num_whole > 100
    assert num_valid > 250
