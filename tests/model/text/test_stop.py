from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.text.tokenizer import StopChecker, StopMatch

letters = st.text(alphabet="ab\u00e9", min_size=0, max_size=40)
stops = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), max_size=4)


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({min(i, len(text)) for i in at})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def first_match(text: str, stop: list[str]) -> StopMatch | None:
    """The naive answer: grow the text by one character until it ends with a stop string."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return StopMatch(longest, end - len(longest), end)
    return None


@settings(max_examples=400, deadline=None)
@given(letters, stops, st.lists(st.integers(0, 40), max_size=10))
@example("aab", ["aaa", "ab"], [1, 2])
def test_a_match_is_found_where_searching_the_whole_text_finds_it(text, stop, at) -> None:
    checker, released, match = StopChecker(stop), "", None
    pushed = ""
    for delta in cut(text, at):
        match = checker.push(delta)
        pushed += delta
        released += checker.release()
        if match:
            break
        held = pushed[len(released) :]
        longest = max(
            (n for s in stop for n in range(len(s)) if n == 0 or pushed.endswith(s[:n])), default=0
        )
        assert checker.safe_length == len(released)
        assert pushed == released + held
        assert len(held) == longest  # no more is held back than may begin a stop string

    expected = first_match(text, stop)
    assert match == checker.match == expected
    released += checker.flush()
    assert released == (text[: expected.start] if expected else text)


@settings(max_examples=200, deadline=None)
@given(letters, st.text(alphabet="ab", min_size=1, max_size=4), st.integers(1, 7))
def test_one_stop_string_matches_where_find_finds_it(text, stop, size) -> None:
    checker = StopChecker([stop])

    for i in range(0, len(text), size):
        if checker.push(text[i : i + size]):
            break

    assert (checker.match.start if checker.match else -1) == text.find(stop)


def test_text_that_may_begin_a_stop_string_waits_until_it_does_not() -> None:
    checker = StopChecker(["\n\nUser:"])

    released = []
    for delta in ("Hello", "\n", "\nUs", "es", " it"):
        assert checker.push(delta) is None
        released.append(checker.release())

    assert released == ["Hello", "", "", "\n\nUses", " it"]


def test_a_match_across_pieces_leaves_the_text_before_it() -> None:
    checker = StopChecker(["END"])

    checker.push("the E")
    before = checker.release()
    match = checker.push("ND and more")

    assert (before, match) == ("the ", StopMatch("END", 4, 7))
    assert checker.release() + checker.flush() == ""
    assert checker.safe_length == 4


def test_the_stop_string_completed_first_wins_over_one_that_begins_earlier() -> None:
    assert StopChecker(["abcd", "bc"]).push("xabcd") == StopMatch("bc", 2, 4)


def test_of_two_completed_by_the_same_character_the_longer_wins() -> None:
    assert StopChecker(["b", "ab"]).push("aab") == StopMatch("ab", 1, 3)


def test_an_unfinished_stop_string_is_given_out_at_the_end() -> None:
    checker = StopChecker(["</s>"])
    checker.push("done </")

    assert (checker.release(), checker.flush(), checker.flush()) == ("done ", "</", "")


def test_without_stop_strings_nothing_is_held_back() -> None:
    checker = StopChecker([])

    assert checker.push("any text") is None
    assert checker.release() == "any text"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopChecker(["a", ""])


def test_characters_outside_the_basic_plane_count_once() -> None:
    assert StopChecker(["\U0001f642!"]).push("a\U0001f642\U0001f642!") == StopMatch(
        "\U0001f642!", 2, 4
    )


def test_work_is_proportional_to_the_text_even_for_self_similar_stop_strings() -> None:
    stop, text = "a" * 5000 + "b", "a" * 200_000
    checker = StopChecker([stop])

    started = time.thread_time()
    for i in range(0, len(text), 4):
        assert checker.push(text[i : i + 4]) is None

    assert time.thread_time() - started < 5  # searching anew at every piece takes minutes
    assert checker.safe_length == 200_000 - 5000
