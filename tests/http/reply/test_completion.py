"""The text of a completion: stop strings that are kept or cut off, and text that is held back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.sampling.parameters import SamplingParams
from server.engine.core.request import FinishReason
from server.engine.link.front_end.request_stream import RequestStream
from server.http.reply.completion import Completion, Prompt, StopStrings
from tests.http.fakes import EOS_ID, IM_END_ID, event

SAMPLING = SamplingParams(max_new_tokens=100)


@pytest.fixture(scope="module")
def complete(tokenizer):
    """Pushes the tokens of a text, the last one with a finish reason, until the completion ends."""

    def run(tokens, *stop, included=False, engine_first=False, last=FinishReason.LENGTH,
            sampling=SAMPLING, **options):  # fmt: skip
        stream = RequestStream(1, lambda _: None, lambda _: None)
        completion = Completion(
            tokenizer,
            Prompt([1], sampling),
            stream,
            sampling,
            StopStrings(stop, included, engine_first),
            **options,
        )
        ids = tokenizer.encode(tokens) if isinstance(tokens, str) else tokens
        texts = []
        for i, token in enumerate(ids):
            texts.append(completion.push(event(token, last if i == len(ids) - 1 else None)))
            if completion.finish_reason is not None:
                break
        assert "".join(texts) == completion.text
        return completion, texts

    return run


def test_a_stop_string_that_is_not_included_is_cut_off(complete):
    completion, _ = complete("one two three", "two")

    assert completion.text == "one "
    assert completion.finish_reason is FinishReason.STOP
    assert completion.num_tokens == 7


def test_text_is_held_back_only_while_it_may_begin_a_stop_string(complete):
    _, texts = complete("a<b<<end", "<<end>>")

    assert texts == ["a", "", "<b", "", "", "", "", "<<end"]


def test_a_stop_string_in_the_last_token_ends_the_text(complete, tokenizer):
    tokens = [*tokenizer.encode("x "), *tokenizer.encode("END.more")]

    cut, _ = complete(tokens, "D.mo")
    kept, _ = complete(tokens, "D.mo", included=True)
    limited, _ = complete(tokens, "D.mo", included=True, engine_first=True)

    assert (cut.text, cut.finish_reason) == ("x EN", FinishReason.STOP)
    assert (kept.text, kept.finish_reason) == ("x END.mo", FinishReason.STOP)
    assert (limited.text, limited.finish_reason) == ("x END.mo", FinishReason.LENGTH)


def test_the_name_of_a_special_token_may_complete_a_stop_string(complete, tokenizer):
    tokens = [*tokenizer.encode("Hi\n"), IM_END_ID, *tokenizer.encode("there")]

    cut, _ = complete(tokens, "\n<|im_end|>")
    kept, _ = complete(tokens, "\n<|im_end|>", included=True)

    assert (cut.text, kept.text) == ("Hi", "Hi\n")
    assert cut.finish_reason is kept.finish_reason is FinishReason.STOP


def test_the_stop_reason_is_the_string_or_the_token_that_ended_the_completion(complete, tokenizer):
    by_string, _ = complete("one two", "tw", "two")
    by_token, _ = complete("one two", last=FinishReason.STOP)
    by_length, _ = complete("one two")

    assert by_string.stop_reason == "tw"
    assert by_token.stop_reason == tokenizer.encode("o")[0]
    assert by_length.stop_reason is None


def test_the_text_of_the_token_that_ends_a_completion_is_cut_off_like_a_stop_string(complete):
    cut, _ = complete("one two", last=FinishReason.STOP)
    kept, _ = complete("one two", last=FinishReason.STOP, included=True)

    assert (cut.text, kept.text) == ("one tw", "one two")


@pytest.mark.parametrize("last", [FinishReason.EOS, FinishReason.LENGTH, FinishReason.TIMEOUT])
@pytest.mark.parametrize("stop", [(), ("!",)])
def test_a_last_token_that_is_no_end_token_is_text(complete, last, stop):
    completion, _ = complete('{"a": 1}', *stop, last=last)

    assert completion.text == '{"a": 1}'
    assert completion.finish_reason is last


def test_an_end_token_is_cut_off_even_if_it_has_text(complete, tokenizer):
    (brace,) = tokenizer.encode("}")
    sampling = SamplingParams(max_new_tokens=100, eos_token_ids=(brace,))

    completion, _ = complete("a}", last=FinishReason.EOS, sampling=sampling)

    assert completion.text == "a"


def test_special_tokens_are_text_on_request(complete, tokenizer):
    tokens = [*tokenizer.encode("a"), IM_END_ID, *tokenizer.encode("b")]

    _, texts = complete(tokens, skip_special_tokens=False)

    assert texts == ["a", "<|im_end|>", "b"]


def test_held_back_text_is_returned_at_the_end(complete, tokenizer):
    completion, texts = complete([*tokenizer.encode("ab"), EOS_ID], "abc", last=FinishReason.EOS)

    assert texts == ["", "", "ab"]
    assert completion.finish_reason is FinishReason.EOS


def test_a_stop_string_before_min_new_tokens_is_ignored(complete):
    sampling = SamplingParams(max_new_tokens=100, min_new_tokens=4)

    completion, _ = complete("a.b.c.d", ".", sampling=sampling)

    assert completion.text == "a.b"


@given(st.text("ab<", max_size=12), st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3))
def test_the_text_ends_before_the_first_completed_stop_string(complete, text, stop):
    completion, _ = complete(text, *stop)

    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert completion.text == text
        return
    first = min(ends)
    longest = max(len(s) for s in stop if text[:first].endswith(s))
    assert completion.text == text[: first - longest]
    assert completion.finish_reason is FinishReason.STOP


def test_the_last_token_of_a_grammar_is_text_unless_it_is_an_end_token(complete, tokenizer):
    sampling = SamplingParams(max_new_tokens=100, eos_token_ids=(EOS_ID,))

    text, _ = complete("{}", last=FinishReason.EOS, sampling=sampling)
    ended, _ = complete(
        [*tokenizer.encode("{}"), EOS_ID],
        last=FinishReason.EOS,
        sampling=sampling,
        skip_special_tokens=False,
    )

    assert text.text == ended.text == "{}"
