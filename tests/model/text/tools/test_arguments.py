"""Arguments of calls: complete ones are objects, and what was cut off is completed without loss."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.text.tools.arguments import complete_arguments, read_arguments

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" ", {}),
        (None, {}),
        ("null", {}),
        ('{"a": "b', '{"a": "b'),
        ("[1]", "[1]"),
        ([1], "[1]"),
        ("text", "text"),
    ],
)
def test_arguments_are_an_object_or_their_text(given_value, expected):
    assert read_arguments(given_value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", {}),
        ('{"city": "spam', {"city": "spam"}),
        ('{"a": [1, {"b": "c\\', {"a": [1, {"b": "c"}]}),
        ('{"a": "\\ud83d\\ude', {"a": ""}),
        ('{"a": 1, "b', {"a": 1, "b": None}),
        ('{"a": 1, "b":', {"a": 1, "b": None}),
        ('{"a": tr', {"a": True}),
        ('{"a": -', {"a": None}),
        ('{"a": 1.', {"a": 1}),
        ('{"a": 1e', {"a": 1}),
        ("text", {"arguments": "text"}),
        ("[1", {"arguments": "[1"}),
        ('{"a": 1}}', {"arguments": '{"a": 1}}'}),
        ("{" * 100_000, {"arguments": "{" * 100_000}),
    ],
)
def test_arguments_that_were_cut_off_are_completed(text, expected):
    assert complete_arguments(text) == expected


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans(), st.data())
def test_every_beginning_of_an_object_is_completed_to_one(value, ascii_only, data):
    text = json.dumps(value, ensure_ascii=ascii_only)
    length = data.draw(st.integers(1, len(text)))

    found = complete_arguments(text[:length])

    assert list(found)[:-1] == list(value)[: max(0, len(found) - 1)]
    json.dumps(found, ensure_ascii=False).encode()
