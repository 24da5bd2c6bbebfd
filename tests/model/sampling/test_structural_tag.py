"""Structural tags: each format of xgrammar's, what it accepts, and what is refused."""

import pytest

from model.errors import GrammarError
from model.sampling.grammar import serialize

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
THINK = {"type": "tag", "begin": "<think>", "content": ANY, "end": "</think>"}
CALL = {"type": "tag", "begin": "<f=a>", "content": INTEGER, "end": "</f>"}
OTHER = {
    "type": "tag",
    "begin": "<f=b>",
    "content": {"type": "regex", "pattern": "[a-z]/x"},
    "end": ["</f>", "</g>"],
}
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL, OTHER]}


def text(value):
    return {"type": "const_string", "value": value}


def seq(*elements):
    return {"type": "sequence", "elements": list(elements)}


@pytest.mark.parametrize(
    ("value", "yes", "no"),
    [
        (text('a"\\\n/'), ['a"\\\n/'], ["a", 'a"\\\n/ ']),
        (INTEGER, ["12"], ["", "a", "12 "]),
        (INTEGER | {"any_order": True, "style": "json"}, ["12"], ["a"]),
        ({"type": "json_schema", "json_schema": True}, ['{"a": [1]}', "1"], ["a"]),
        ({"type": "regex", "pattern": "a/b|c\\/d\n?"}, ["a/b", "c/d", "c/d\n"], ["a", "a/bc/d"]),
        ({"type": "grammar", "grammar": 'root ::= ("y" | "n") x\nx ::= [0-9]+'}, ["y1", "n22"], ["y", "x1"]),
        ({"type": "grammar", "grammar": 'start: "y" x\nx: /[0-9]/'}, ["y1"], ["y", "y12"]),
        (ANY, ["", "a\nb", "é"], []),
        (ANY | {"excludes": ["<f", "x"]}, ["", "a<"], ["a<f", "axb"]),
        (ANY | {"max_chars": 3}, ["", "abc", "é€a"], ["abcd"]),
        (ANY | {"max_chars": 3, "excludes": ["b"]}, ["aac"], ["abc", "aaaa"]),
        (seq(text("a"), INTEGER, text("b")), ["a1b", "a12b"], ["a1", "1b", "ab"]),
        (seq(text("a"), ANY), ["a", "abc"], ["b", ""]),
        (seq(ANY, text("END")), ["END", "abEND"], ["abEN", "ENDx", ""]),
        (seq(ANY, CALL), ["<f=a>1</f>", "b <f=a>1</f>"], ["b", "b <f=a>x</f>"]),
        (
            seq(THINK, CALLS),
            ["<think>a<f=</think>b<f=a>1</f>c", "<think></think>"],
            ["b", "<think>", "<think></think><f=c>"],
        ),
        ({"type": "or", "elements": [text("yes"), INTEGER]}, ["yes", "1"], ["no", ""]),
        ({"type": "or", "elements": [THINK, ANY | {"excludes": ["<"]}]}, ["<think></think>", "abc", ""], ["a<b"]),
        (seq({"type": "optional", "content": text("a")}, text("b")), ["ab", "b"], ["aab", "a"]),
        ({"type": "plus", "content": text("ab")}, ["ab", "abab"], ["", "aba"]),
        ({"type": "star", "content": CALL}, ["", "<f=a>1</f><f=a>2</f>"], ["<f=a>1"]),
        ({"type": "repeat", "min": 1, "max": 2, "content": text("ab")}, ["ab", "abab"], ["", "ababab"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": text("a")}, ["aa", "aaaaa"], ["a"]),
        (CALL, ["<f=a>12</f>"], ["<f=a>12", "<f=a>x</f>", "12"]),
        (OTHER, ["<f=b>q/x</f>", "<f=b>q/x</g>"], ["<f=b>q/x</h>"]),
        (THINK, ["<think></think>", "<think>a</b></think>"], ["<think>", "<think></think>a"]),
        (THINK | {"end": ["</a>", "</b>"]}, ["<think>x</a>", "<think></b>"], ["<think></a></b>"]),
        (THINK | {"content": ANY | {"excludes": ["q"]}}, ["<think>x</think>"], ["<think>q</think>"]),
        (THINK | {"content": ANY | {"max_chars": 2}}, ["<think>xy</think>"], ["<think>xyz</think>"]),
        (THINK | {"content": CALLS}, ["<think>x</think>", "<think>a<f=a>1</f>b</think>"], ["<think><f=a>1</think>"]),
        (THINK | {"end": ""}, ["<think>abc"], ["abc"]),
        (CALLS, ["", "a", "a<f=a>1</f>b<f=b>q/x</f>"], ["<f=", "<f=a>x</f>", "<f=c>", "<f=a>1"]),
        (CALLS | {"at_least_one": True}, ["<f=a>1</f>", "<f=a>1</f>x<f=a>2</f>y"], ["", "x", "x<f=a>1</f>"]),
        (CALLS | {"stop_after_first": True}, ["", "x", "x<f=a>1</f>"], ["<f=a>1</f>x", "<f=", "x<f=a>1</f><f=a>1</f>"]),
        (
            CALLS | {"at_least_one": True, "stop_after_first": True},
            ["<f=a>1</f>", "<f=b>q/x</g>"],
            ["", "x<f=a>1</f>", "<f=a>1</f>x"],
        ),
        (CALLS | {"excludes": ["no"]}, ["n<f=a>1</f>o"], ["no", "no<f=a>1</f>", "<f=a>1</f>no"]),
        (
            THINK | {"content": CALLS | {"stop_after_first": True}},
            ["<think>x</think>", "<think><f=a>1</f></think>"],
            ["<think><f=a>1</f>x</think>"],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ", "},
            ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>q/x</f>"],
            ["<f=a>1</f>,", "<f=a>1</f><f=a>1</f>", "x"],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL], "separator": "", "at_least_one": True},
            ["<f=a>1</f>", "<f=a>1</f><f=a>2</f>"],
            [""],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL], "separator": ",", "stop_after_first": True},
            ["", "<f=a>1</f>"],
            ["<f=a>1</f>,<f=a>1</f>"],
        ),
        (
            {"type": "dispatch", "rules": [["<a>", INTEGER], ["<b>", text("x;")]]},
            ["", "q<a>12 r<b>x;s", "<b>x;<b>x;"],
            ["<a>", "<a>x", "<b>y"],
        ),
        (
            {"type": "dispatch", "rules": [["<b>", text("x;")]], "loop": False, "excludes": ["!"]},
            ["", "q", "q<b>x;"],
            ["<b>x;y", "<b>", "!"],
        ),
    ],
)  # fmt: skip
def test_a_format_accepts_what_follows_it(accepts, value, yes, no):
    tag = {"type": "structural_tag", "format": value}

    assert [t for t in yes if not accepts("structural_tag", tag, t)] == []
    assert [t for t in no if accepts("structural_tag", tag, t)] == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "`format` must be an object with a `type`"),
        ({"type": 1}, "`format` must be an object with a `type`"),
        ({"type": "token", "token": 5}, "`format.type` must be one of const_string"),
        ({"type": "any_tokens"}, "`format.type` must be one of"),
        (seq(), "`format.elements` must be a list, not empty"),
        (seq(text("a"), {"type": "x"}), "`format.elements.1.type` must be one of"),
        (seq(ANY, INTEGER), "`format.elements.1` must begin with a fixed string"),
        ({"type": "star", "content": ANY}, "`format.content` is free text: it must come last"),
        (seq({"type": "or", "elements": [ANY, text("a")]}, text("b")), "`format.elements.0.elements.0` is free text"),
        (text(1), "`format.value` must be a string"),
        ({"type": "json_schema"}, "`format.json_schema` is required"),
        (INTEGER | {"style": "qwen_xml"}, "`format.style` must be json"),
        (ANY | {"max_tokens": 5}, "`format.max_tokens` is not supported"),
        (ANY | {"max_chars": -1}, "`format.max_chars` must be an integer from 0"),
        (ANY | {"excludes": [""]}, "`format.excludes` must be a list of strings"),
        ({"type": "repeat", "min": 2, "max": 1, "content": text("a")}, "`format.max` must be >= `min`"),
        (CALL | {"begin": {"type": "token", "token": 5}}, "`format.begin` must be a string"),
        (CALL | {"end": []}, "`format.end` must be a string or a list of strings"),
        (CALLS | {"triggers": ["<g"]}, "starts with none of the triggers"),
        (CALLS | {"triggers": ["<f=", "<g"]}, "no tag begins with the trigger"),
        (CALLS | {"at_least_one": 1}, "`format.at_least_one` must be true or false"),
        (CALLS | {"tags": [ANY]}, "`format.tags.0` must be a tag"),
        ({"type": "dispatch", "rules": [["a", INTEGER]]}, "`format`: a trigger must have two bytes or more"),
        ({"type": "dispatch", "rules": [["a"]]}, "`format.rules.0` must be a list of a string and a format"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_its_place(value, reason):
    with pytest.raises(GrammarError) as error:
        serialize("structural_tag", {"type": "structural_tag", "format": value})

    assert reason in str(error.value)
