"""Patterns of JSON schemas: what grammars make of them."""

import json

import pytest

from model.errors import GrammarError
from model.sampling.grammar import compile_constraint, compile_matcher
from model.text.schema.patterns import check_pattern, is_found


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"^\p{Cc}{1,2}$", ["\n", "\x01\x02"], ['"', "\\", '\n"', "a"]),
        (r"^\P{P}$", ["a", "\n", " "], ['"', "\\", "!"]),
        (r"^\P{L}$", ['"', "\\", "\n", "1"], ["a"]),
        (r"^\p{Lu}\p{Ll}$", ["Aa", "\u00c9\u00e9"], ["aA", 'A"']),
    ],
)
def test_classes_of_characters_hold_in_json(tokenizer, vocabulary, pattern, matching, other):
    found = compile_constraint(vocabulary, "json_schema", {"type": "string", "pattern": pattern})
    assert found.unenforced == ()

    def follows(text):
        matcher = compile_matcher(vocabulary, found.grammar)
        token_ids = tokenizer.encode(json.dumps(text, ensure_ascii=False), add_special_tokens=False)
        return all(map(matcher.accept, token_ids)) and matcher.is_accepting

    assert [text for text in matching if not follows(text)] == []
    assert [text for text in other if follows(text)] == []


@pytest.mark.parametrize("pattern", ["a{2}{3}", "a*{2}", "a{2}*", "a{3,2}", "a++b+*"])
def test_repetitions_of_repetitions_are_no_patterns(pattern):
    with pytest.raises(GrammarError):
        check_pattern(pattern)


def test_references_to_named_groups_are_checked():
    assert is_found(r"^(?<y>\d)-\k<y>$", "1-1")
    assert is_found(r"^(?<y>\d)-\k<y>$", "1-2") is False
