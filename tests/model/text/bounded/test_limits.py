"""Limits of tokenizer.json, at their boundaries."""

import base64
import json

import pytest

from model.errors import TokenizerError
from model.text.tokenizer import Tokenizer

VOCABULARY = {"a": 0, "b": 1, "ab": 2, "[UNK]": 3}


def write(folder, *, model=None, **parts):
    """Write a small tokenizer.json; the parts as in the file."""
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "vocab": VOCABULARY, "merges": [["a", "b"]], "unk_token": "[UNK]"} | (model or {}),
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content | parts))
    return folder


def added(count, size=8, first=4):
    return [
        {
            "id": first + i, "content": f"<{i}>".ljust(size, "x"), "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": False,
        }
        for i in range(count)
    ]  # fmt: skip


def replace(content, old="a", kind="String"):
    return {"type": "Replace", "pattern": {kind: old}, "content": content}


def sequence(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


def template(count):
    return {
        "type": "TemplateProcessing",
        "single": [*[{"SpecialToken": {"id": "a", "type_id": 0}}] * count, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}},
    }  # fmt: skip


def charsmap(text):
    return {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(
            (1024).to_bytes(4, "little") + bytes(1024) + text.encode() + b"\0"
        ).decode(),
    }


REFUSED = {
    "a chain that doubles a text 40 times": (
        {"normalizer": sequence(*[replace("aa")] * 40)}, r"growth of a text by normalizer: 1024; at most 1000"
    ),
    "the same in the form of older versions": (
        {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 40}},
        "growth of a text by normalizer|is not a tokenizer",
    ),
    "the same, nested": (
        {"normalizer": sequence(*[sequence(sequence(replace("aa")), sequence())] * 20)}, "growth of a text"
    ),
    "a chain of pre-tokenizers that double a text": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}] * 20}},
        "growth of a text by pre_tokenizer",
    ),
    "a chain of decoders that double a text": (
        {"decoder": {"type": "Sequence", "decoders": [replace("aa")] * 20}}, "growth of a text by decoder"
    ),
    "text for every place between characters": (
        {"normalizer": replace("a" * 1000, "x*", "Regex")}, "growth of a text by normalizer: 1001"
    ),
    "a long text to insert": ({"normalizer": replace("a" * 1001, "a" * 100)}, "Replace inserts: 1001; at most 1000"),
    "a long text before all": ({"normalizer": {"type": "Prepend", "prepend": "a" * 1001}}, "Prepend inserts: 1001"),
    "a table with a long text": ({"normalizer": charsmap("x" * 1001)}, "growth of a text by normalizer: 1001"),
    "many steps": (
        {"normalizer": sequence(*[{"type": "NFC"}] * 65)}, "steps of normalizer: 65; at most 64|growth"
    ),
    "a long pattern": ({"pre_tokenizer": {
        "type": "Split", "pattern": {"Regex": "a" * 1001}, "behavior": "Isolated", "invert": False
    }}, "characters of a pattern: 1001"),
    "a decoder that may take long": ({"decoder": replace("", "(a+)+$", "Regex")}, "a decoder must not"),
    "many tokens that are added to each text": ({"post_processor": template(1001)}, "adds: 1001; at most 1000"),
    "a text that is repeated": (
        {"post_processor": template(0) | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}}, "repeats a text: 2"
    ),
    "many added tokens": ({"added_tokens": added(100_001)}, "added tokens: 100001; at most 100000"),
    "a long added token": ({"added_tokens": added(1, 1001)}, "characters of an added token: 1001"),
    "long added tokens": ({"added_tokens": added(4001, 1000)}, "characters of all added tokens: 4001000"),
    "a long token": ({"model": {"vocab": VOCABULARY | {"a" * 4097: 4}}}, "characters of the longest token: 4097"),
    "a long token of a list": (
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["a" * 4097, 0.0]], "merges": []}},
        "characters of the longest token: 4097",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_tokenizer_in_use_needs_is_refused_with_value_and_limit(tmp_path, case):
    parts, message = REFUSED[case]
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_folder(write(tmp_path, **parts))

    assert str(tmp_path / "tokenizer.json") in str(caught.value)


ALLOWED = {
    "at the limit of growth": {"normalizer": sequence(*[replace("aa")] * 9)},
    "at the limit of what is inserted": {"normalizer": replace("a" * 1000, "a" * 100)},
    "at the limit of steps": {"normalizer": sequence(*[{"type": "StripAccents"}] * 64)},
    "at the limit of tokens that are added": {"post_processor": template(1000)},
    "at the limit of an added token": {"added_tokens": added(1, 1000)},
    "at the limit of a token": {"model": {"vocab": VOCABULARY | {"a" * 4096: 4}}},
    "padding and truncation of any size": {
        "padding": {
            "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "a",
        },
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_at_a_limit_is_used(tmp_path, case):
    tokenizer = Tokenizer.from_folder(write(tmp_path, **ALLOWED[case]))

    assert 1 <= len(tokenizer.encode("ab")) <= 1100
    tokenizer.close()


def word_piece(longest):
    return {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": longest, "merges": [],
    }  # fmt: skip


def unigram(size):
    return {
        "type": "Unigram", "unk_id": 0, "byte_fallback": False, "merges": [],
        "vocab": [["<unk>", 0.0], *(["a" * i, -1.0] for i in range(1, size + 1))],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "is_linear"),
    [
        ({}, True),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"normalizer": sequence(charsmap("x" * 30), replace("▁", " "))}, True),
        ({"normalizer": sequence(*[replace("aa")] * 7)}, True),
        ({"normalizer": sequence(*[replace("aa")] * 8)}, False),
        ({"normalizer": replace(" ", " {2,}", "Regex")}, True),
        ({"normalizer": replace(" ", "(a+)+$", "Regex")}, False),
        ({"model": word_piece(1000)}, True),
        ({"model": word_piece(1001)}, False),
        ({"model": unigram(64)}, True),
        ({"model": unigram(65)}, False),
    ],
)
def test_a_tokenizer_whose_time_is_not_bounded_is_known(tmp_path, parts, is_linear):
    tokenizer = Tokenizer.from_folder(write(tmp_path, **parts))

    assert tokenizer.is_linear is is_linear
    tokenizer.close()


def test_the_tokenizer_is_linear_and_hardly_lengthens_a_text(tokenizer):
    assert tokenizer.is_linear
    assert tokenizer.growth == 2  # a byte may become a character of two bytes


def test_many_tokens_of_tokenizer_config_json_are_added_at_once(tmp_path):
    write(tmp_path)
    entries = {
        str(4 + i): {"content": f"<{i}>", "special": i % 2 == 0, "lstrip": False}
        for i in range(20_000)
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))

    tokenizer = Tokenizer.from_folder(tmp_path)

    assert tokenizer.encode("<19999>a<2>") == [20_003, 0, 6]
    assert tokenizer.is_special(6)
    assert not tokenizer.is_special(20_003)


def test_the_tokens_of_tokenizer_config_json_have_the_same_limits(tmp_path):
    write(tmp_path)
    entries = {"4": {"content": "x" * 1001}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))

    with pytest.raises(
        TokenizerError, match=r"tokenizer_config\.json: characters of an added token"
    ):
        Tokenizer.from_folder(tmp_path)
