"""Grammars: what they accept, on byte-level and SentencePiece vocabularies."""

import json

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.structured_output import Walker, validity
from model.errors import GrammarError
from model.sampling.followed_matcher import MatcherRules
from model.sampling.grammar import (
    GrammarTokenizer,
    check,
    compile_matcher,
    serialize,
)
from model.sampling.token_masker import TokenMasker
from model.text.lark import MAX_TEXT_CHARACTERS
from model.text.tokenizer import Tokenizer

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAGS = {
    "structures": [
        {"begin": "<f=a>", "schema": OBJECT, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    ("kind", "value", "yes", "no"),
    [
        (
            "json_schema",
            OBJECT,
            ['{"a": 5}', '{"a": 5, "b": "x"}'],
            ['{"b": "x"}', '{"a": 5', "[]"],
        ),
        ("json_schema", json.dumps(OBJECT), ['{"a": 5}'], ['{"a": "5"}']),
        ("json_schema", True, ["5", "{}", "null"], ["", "{"]),
        ("json_object", None, ['{"x": [1, {"y": null}]}', "{}"], ["[]", "5"]),
        ("regex", "[a-c]{2,3}", ["ab", "abc"], ["a", "abcd"]),
        ("regex", "^a|b$", ["a", "b"], ["ab"]),
        (
            "choice",
            ["yes", "no way", 'a "quote"\n', ""],
            ["yes", "no way", 'a "quote"\n', ""],
            ["no"],
        ),
        ("lark", 'start: "a" b\nb: /[0-9]+/', ["a1", "a12"], ["a", "b1"]),
        ("lark", 'root ::= "a" [0-9]+\n', ["a1"], ["a"]),
        (
            "lark",
            r'root ::= [\u00e9\u005d\\] "\u00E9\U0001F600"',
            ["éé😀", "]é😀", "\\é😀"],
            ["ué"],
        ),
        (
            "structural_tag",
            TAGS,
            ["text", "x <f=b>12</f> y", '<f=a>{"a": 1}</f><f=b>2</f>'],
            ["x <f=", "x <f=c>", "x <f=b>12", "x <f=b>y</f>"],
        ),
    ],
)
def test_a_constraint_accepts_what_follows_it(accepts, kind, value, yes, no):
    assert [text for text in yes if not accepts(kind, value, text)] == []
    assert [text for text in no if accepts(kind, value, text)] == []


@pytest.mark.parametrize(
    "text", ['{"a":5}', '{"a":  5}', '{"a": 5 }', '{\n"a": 5}', ' {"a": 5}', '{"a": 5}\n']
)
def test_json_has_the_white_space_of_json_dumps_only(accepts, text):
    assert not accepts("json_schema", OBJECT, text)


@settings(max_examples=60)
@given(choices=st.lists(st.text(max_size=8), min_size=1, max_size=4), other=st.text(max_size=8))
def test_every_choice_is_accepted_and_nothing_else(accepts, choices, other):
    assert all(accepts("choice", choices, choice) for choice in choices)
    assert accepts("choice", choices, other) == (other in choices)


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", 5, "must be a JSON schema, an object"),
        ("json_schema", "{", "is not valid JSON"),
        ("json_schema", {"not": {"minimum": 1}}, "the JSON schema keyword `not` is not supported"),
        (
            "json_schema",
            {"not": {"minimum": 1}, "items": {"contains": {"type": "null"}}},
            "keywords `contains`, `not` are not supported (at `/not`, `/items/contains`)",
        ),
        ("json_schema", False, "Unsatisfiable"),
        ("json_schema", {"enum": [-(2**64)]}, "the JSON schema keyword `enum` is not supported"),
        ("json_schema", {"enum": ["x" * MAX_TEXT_CHARACTERS]}, "at most 131072 characters"),
        (
            "structural_tag",
            {"structures": [{"begin": "0"}], "triggers": ["0"]},
            "`structures.0.end` is required, since a trigger is a single byte",
        ),
        ("choice", [], "must be a list of strings, at least one"),
        ("choice", [1], "must be a list of strings, at least one"),
        ("regex", 5, "must be a string"),
        ("regex", "(", "unclosed group"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "(ab|cd)\\", "ends in a lone backslash"),
        ("regex", r"[^\s\S]", "no text follows this grammar"),
        ("lark", "start: missing", 'unknown name: "missing"'),
        ("lark", "root ::= (", "expected"),
        ("structural_tag", {"format": {}}, "the key `format`"),
        ("structural_tag", {"structures": [], "triggers": ["<"]}, "`structures` must be a list"),
        ("structural_tag", {**TAGS, "triggers": ["<g"]}, "starts with none of the triggers"),
        ("structural_tag", {**TAGS, "triggers": ["<f=", "<g"]}, "no structure begins"),
    ],
)
def test_a_constraint_that_cannot_be_used_is_refused_with_the_reason(
    vocabulary, kind, value, reason
):
    with pytest.raises(GrammarError) as error:
        check(vocabulary, serialize(kind, value))

    assert reason.lower() in str(error.value).lower()
    assert str(error.value).isprintable()


def test_a_matcher_forces_what_is_certain_and_copies_are_independent(tokenizer, vocabulary):
    matcher = compile_matcher(vocabulary, serialize("json_schema", OBJECT))
    forced = matcher.forced_tokens()
    assert tokenizer.decode(forced) == '{"a":'
    other = matcher.copy()
    for token_id in forced:
        assert matcher.accept(token_id)

    assert not matcher.is_accepting
    assert other.forced_tokens() == forced
    assert not other.accept(tokenizer.encode("x", add_special_tokens=False)[0])
    assert other.error
    assert not matcher.error


def test_masks_of_many_matchers_are_those_of_each_alone(vocabulary):
    kinds = [("regex", "[a-f]+"), ("json_object", None), ("choice", ["x"]), ("regex", "")]
    matchers = [compile_matcher(vocabulary, serialize(*kind)) for kind in kinds * 8]
    matchers += [matcher.copy() for matcher in matchers]
    together, alone = TokenMasker(vocabulary), TokenMasker(vocabulary)
    together.compute(matchers)
    words = [together.masks.words[matcher.slot].copy() for matcher in matchers]

    for i in range(len(kinds)):
        copy = matchers[i].copy()
        alone.compute([copy])
        for k in range(i, len(matchers), len(kinds)):
            assert np.array_equal(words[k], alone.masks.words[copy.slot])


def allowed_ids(masker, matcher):
    masker.compute([matcher])
    words = masker.masks.words[matcher.slot]
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_end_tokens_are_allowed_where_the_grammar_accepts_or_nothing_else_is(vocabulary):
    masker = TokenMasker(vocabulary)

    def allowed(pattern, ends_from):
        matcher = compile_matcher(vocabulary, serialize("regex", pattern))
        return allowed_ids(masker, matcher.copy(MatcherRules(ends_from)))

    assert 0 in allowed("a*", 0)
    assert 0 not in allowed("a*", 1)
    assert 0 not in allowed("a+", 0)
    assert allowed("", 1) == {0}


def test_logits_without_a_token_are_never_allowed(tokenizer):
    vocabulary = GrammarTokenizer(tokenizer, 5000, [0])
    matcher = compile_matcher(vocabulary, serialize("regex", "(?s:.*)"))

    allowed = allowed_ids(TokenMasker(vocabulary), matcher)

    assert len(allowed & set(range(4096 - 1))) > 3000
    assert max(allowed) < tokenizer.vocab_size


def test_tokens_that_are_accepted_ahead_are_those_that_single_steps_would_sample(vocabulary):
    grammar = serialize("json_schema", OBJECT)
    rules = MatcherRules(most_tokens=40, follows_forced=True)
    first = compile_matcher(vocabulary, grammar)
    matchers = [first.copy(rules) for _ in range(6)]
    plain = [first.copy() for _ in matchers]
    masker, single = TokenMasker(vocabulary), TokenMasker(vocabulary)
    rng = np.random.default_rng(5)
    for _ in range(12):
        masker.compute(matchers)
        chosen = []
        for matcher, other in zip(matchers, plain, strict=True):
            allowed = allowed_ids(single, other)
            assert allowed_ids(masker, matcher) == allowed
            chosen.append(int(rng.choice(sorted(allowed))))
        masker.advance(list(zip(matchers, chosen, strict=True)))
        for matcher, other, token_id in zip(matchers, plain, chosen, strict=True):
            assert other.accept(token_id)
            forced = matcher.ahead[1:]
            if matcher.continues_after(token_id):
                assert not forced
            else:
                assert matcher.accept(token_id)
            assert matcher.forced_tokens() == forced == other.forced_tokens()
            for expected in forced:
                assert matcher.accept(expected)
                assert other.accept(expected)
            assert matcher.is_complete == other.is_complete
        going_on = [i for i, matcher in enumerate(matchers) if not matcher.is_complete]
        matchers, plain = [matchers[i] for i in going_on], [plain[i] for i in going_on]


def test_a_token_that_is_not_allowed_is_refused_when_its_owner_accepts_it(tokenizer, vocabulary):
    good, bad = (compile_matcher(vocabulary, serialize("regex", "[a-f]+")) for _ in range(2))
    (a,), (x,) = (tokenizer.encode(text, add_special_tokens=False) for text in "ax")
    masker = TokenMasker(vocabulary)
    masker.advance([(bad, x), (good, a)])

    assert not bad.continues_after(x)
    assert not bad.accept(x)
    assert bad.error
    assert good.continues_after(a)
    assert not good.error


def test_no_more_tokens_are_followed_than_the_output_has(vocabulary):
    rules = MatcherRules(most_tokens=4, follows_forced=True)
    matcher = compile_matcher(vocabulary, serialize("choice", ["x" + "ab" * 500])).copy(rules)
    masker = TokenMasker(vocabulary)
    (first, *_) = allowed_ids(masker, matcher)
    masker.advance([(matcher, first)])

    assert len(matcher.ahead) == 4
    assert not matcher.has_stopped


def test_the_slot_of_a_matcher_that_is_gone_is_used_again(vocabulary):
    masker = TokenMasker(vocabulary)
    first = compile_matcher(vocabulary, serialize("regex", "[a-f]+"))
    for _ in range(100):
        masker.compute([first, first.copy()])

    assert len(masker.masks.words) == 16
    assert allowed_ids(masker, first) == allowed_ids(masker, first.copy())


def test_schemas_of_many_shapes_accept_only_documents_that_validate(tokenizer, vocabulary):
    found = validity(tokenizer, vocabulary, count=40, seed=11, walks=2)

    assert found["invalid_outputs"] == []
    assert found["invalid_documents_accepted"] == []
    assert found["complete_outputs"] > 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_300_schemas_accept_only_documents_that_validate(tokenizer, vocabulary):
    found = validity(tokenizer, vocabulary, count=300, seed=0)

    assert found["invalid_outputs"] == []
    assert found["invalid_documents_accepted"] == []
    assert found["check_cpu_ms"]["p99"] <= 20


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_strip"])
def test_the_text_of_allowed_tokens_follows_the_grammar_with_every_kind_of_vocabulary(
    libraries, kind
):
    tokenizer = Tokenizer(libraries[kind], "<s>", "</s>")
    vocabulary = GrammarTokenizer(tokenizer, tokenizer.vocab_size, [2])
    matcher = compile_matcher(vocabulary, serialize("json_schema", OBJECT))
    walker = Walker(tokenizer, vocabulary, seed=3)

    texts = [walker.walk(matcher.copy(), 200) for _ in range(20)]

    documents = [json.loads(text) for text in texts if text is not None]
    assert len(documents) > 5
    for document in documents:
        jsonschema.validate(document, OBJECT)


@pytest.mark.parametrize("kind", ["metaspace_always", "word_piece"])
def test_a_vocabulary_whose_tokens_have_no_fixed_bytes_is_refused(libraries, kind):
    tokenizer = Tokenizer(libraries[kind], "<s>", "</s>")

    with pytest.raises(GrammarError, match="does not support this model's tokenizer"):
        GrammarTokenizer(tokenizer, tokenizer.vocab_size, [2])
