"""Calls are found in a message, however its text is divided."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.text.tools.formats import BY_NAME, FORMATS
from model.text.tools.parser import CallParser
from tests.model.text.tools.tool_cases import CALLS, TEXTS, make_tools, parse

NAMES = [row.name for row in FORMATS]


def parser_of(name):
    return CallParser(BY_NAME[name], make_tools(BY_NAME[name]))


@pytest.mark.parametrize("name", NAMES)
def test_the_calls_of_a_message_are_found(name):
    message = parse(parser_of(name), [TEXTS[name]])

    assert message.decoded() == CALLS
    assert message.content == ""


@pytest.mark.parametrize("name", [n for n in NAMES if n != "llama3"])
def test_text_before_the_calls_is_content(name):
    message = parse(parser_of(name), ["I look <it> up [now]. " + TEXTS[name]])

    assert message.content == "I look <it> up [now]. "
    assert message.decoded() == CALLS


@pytest.mark.parametrize("name", NAMES)
def test_a_message_without_calls_is_content(name):
    marker = BY_NAME[name].marker or "<|python_tag|>"
    for text in (
        "",
        "Hi",
        '{"name": 3}',
        marker,
        f"a {marker}",
        f"{marker}\n{{",
        f"{marker}{marker}x",
    ):
        message = parse(parser_of(name), [text])
        assert (message.content, message.calls) == (text, [])


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_an_unknown_tool_is_content(name):
    text = TEXTS[name].replace("weather", "whether").replace("now", "never")

    message = parse(parser_of(name), [text])

    assert (message.content, message.calls) == (text, [])


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_returned_while_they_are_generated(name):
    text, parser = TEXTS[name], parser_of(name)
    place = text.index("ln") + 1

    delta = parser.push(text[:place])

    assert [(call.index, call.name) for call in delta.calls] == [(0, "weather")]
    assert delta.calls[0].arguments == '{"city": "Köl'
    assert parser.push(text[place]).calls[0].arguments == "n"


@pytest.mark.parametrize("name", NAMES)
def test_syntax_that_is_cut_off_after_the_arguments_is_dropped(name):
    format_ = BY_NAME[name]
    arguments = "{}" if format_.arguments == "json" else ""
    end = format_.tail + format_.separator + format_.head_of("now")
    begin = f"{format_.marker}{format_.opening}{format_.head_of('now')}{arguments}"
    for length in range(len(end)):
        parser = parser_of(name)
        message = parse(parser, [begin + end[:length]])
        assert [call_name for call_name, _ in message.calls] == ["now"]
        assert message.content + message.trailing == ""
        assert parser.call_complete or format_.arguments == "xml"


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_complete_with_the_end_of_its_arguments(name):
    parser, complete = parser_of(name), []
    for character in TEXTS[name]:
        calls = parser.num_calls
        parser.push(character)
        if parser.num_calls > calls or parser.call_complete:
            complete.append((parser.num_calls, parser.call_complete))

    assert [one for one, _ in itertools.groupby(complete)] == [
        (number, ended) for number in (1, 2, 3) for ended in (False, True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_text_after_the_calls_is_apart_from_that_before(name):
    message = parse(parser_of(name), [TEXTS[name] + "<|end|>"])

    assert (message.content, message.trailing) == ("", "<|end|>")
    assert message.decoded() == CALLS


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_divided(name, data):
    format_ = BY_NAME[name]
    full = TEXTS[name]
    pieces = [
        full, full[: len(full) // 2], format_.marker, format_.opening, format_.head_of("now"), format_.separator,
        format_.closing, format_.tail, "<parameter=city>\n", "<parameter=days>\n", "\n</parameter>\n", "{}", '{"a": "',
        "<|python_tag|>", "é", '"', "\\", "}", "<", "\n", "[", "x",
    ]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    borders = [0, *cuts, len(text)]
    divided = [text[a:b] for a, b in itertools.pairwise(borders)]

    whole, parts = parse(parser_of(name), [text]), parse(parser_of(name), divided)
    characters = parse(parser_of(name), text)

    assert vars(whole) == vars(parts) == vars(characters)
