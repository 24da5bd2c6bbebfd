"""Schemas that are reduced: what a grammar enforces of them."""

import pytest

from model.errors import GrammarError
from model.text.schema.reduce import lower

NUM_OPTIONS = 150


def of_kind(name):
    return {
        "type": "object",
        "properties": {"kind": {"type": "string", "const": name}, "value": {"type": "integer"}},
        "required": ["kind"],
    }


NAMES = [f"k{i}" for i in range(NUM_OPTIONS)]


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"const": name, "title": name} for name in NAMES]},
        {"oneOf": [{"enum": [name, i]} for i, name in enumerate(NAMES)]},
        {"oneOf": [of_kind(name) for name in NAMES]},
        {
            "oneOf": [{"$ref": f"#/$defs/{name}"} for name in NAMES],
            "$defs": {name: of_kind(name) for name in NAMES},
        },
    ],
)
def test_options_that_list_their_values_exclude_each_other_however_many_there_are(schema):
    assert lower(schema, strict=True).unenforced == ()


@pytest.mark.parametrize(
    "options",
    [
        [*({"const": name} for name in NAMES), {"enum": ["x", "k3"]}],
        [{"const": 1}, {"const": 1.0}],
        [*map(of_kind, NAMES), of_kind("k7")],
        [{**of_kind(name), "required": []} for name in NAMES],
        [{**of_kind(name), "type": ["object", "null"]} for name in NAMES],
    ],
)
def test_options_that_share_a_value_do_not_exclude_each_other(options):
    with pytest.raises(GrammarError, match="`oneOf`"):
        lower({"oneOf": options}, strict=True)


def test_a_long_list_of_values_beside_their_type_is_reduced_quickly():
    values = [f"value {i}" for i in range(5000)]
    schema = {"type": "string", "enum": [*values, 3, None, True]}

    assert lower(schema).schema == {"enum": values}


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("integer", [1, 2.0]),
        ("number", [1, 2.0, 2.5]),
        (["null", "boolean"], [None, True]),
        (["array", "object"], [[1], {"a": 1}]),
    ],
)
def test_values_of_other_types_are_left_out(kinds, kept):
    values = [1, 2.0, 2.5, None, True, "a", [1], {"a": 1}]

    assert lower({"type": kinds, "enum": values}).schema == {"enum": kept}


@pytest.mark.parametrize(
    "beside",
    [
        {"dependentSchemas": {"a": {"properties": {"b": {}}, "required": ["b"]}}},
        {"if": {"required": ["a"]}, "then": {"properties": {"b": {}}}},
    ],
)
def test_what_a_condition_evaluates_stays_possible(beside):
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"]} | beside

    lowered = lower(schema | {"unevaluatedProperties": False})

    assert "/unevaluatedProperties" in [item.place for item in lowered.unenforced]
    assert "additionalProperties" not in lowered.schema
