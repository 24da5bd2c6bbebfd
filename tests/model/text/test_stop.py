from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.text.stop import StopChecker, StopMatch

letters = st.text(alphabet="ab\u00e9", min_size=0, max_size=40)
stops = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), max_size=4)


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({min(i, len(text)) for i in at})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def first_match(text: str, stop: list[str]) -> StopMatch | None:
    """Naive search: extend the text by one character at a time until it ends with a stop string."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return StopMatch(longest, end - len(longest), end)
    return None


@settings(max_examples=400)
@given(letters, stops, st.lists(st.integers(0, 40), max_size=10))
@example("aab", ["aaa", "ab"], [1, 2])
def test_a_match_equals_that_of_a_search_in_the_whole_text(text, stop, at) -> None:
    checker = StopChecker(stop)

    found = (checker.push(delta) for delta in cut(text, at))

    assert next((match for match in found if match), None) == first_match(text, stop)


@settings(max_examples=200)
@given(letters, st.text(alphabet="ab", min_size=1, max_size=4), st.integers(1, 7))
def test_one_stop_string_matches_where_str_find_finds_it(text, stop, size) -> None:
    checker = StopChecker([stop])

    found = (checker.push(text[i : i + size]) for i in range(0, len(text), size))

    assert next((match.start for match in found if match), -1) == text.find(stop)


def test_a_match_across_pieces_has_positions_in_the_whole_text() -> None:
    checker = StopChecker(["END"])

    assert checker.push("the E") is None
    assert checker.push("ND and more") == StopMatch("END", 4, 7)


def test_the_stop_string_that_ends_first_takes_precedence_over_one_that_begins_earlier() -> None:
    assert StopChecker(["abcd", "bc"]).push("xabcd") == StopMatch("bc", 2, 4)


def test_of_two_stop_strings_that_end_together_the_longer_matches() -> None:
    assert StopChecker(["b", "ab"]).push("aab") == StopMatch("ab", 1, 3)


def test_without_stop_strings_nothing_matches() -> None:
    assert StopChecker([]).push("any text") is None


def test_an_empty_stop_string_is_rejected() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopChecker(["a", ""])


def test_characters_outside_the_basic_plane_count_once() -> None:
    assert StopChecker(["\U0001f642!"]).push("a\U0001f642\U0001f642!") == StopMatch(
        "\U0001f642!", 2, 4
    )


def test_time_is_linear_in_the_text_even_for_self_similar_stop_strings() -> None:
    stop, text = "a" * 5000 + "b", "a" * 200_000
    checker = StopChecker([stop])

    started = time.thread_time()
    for i in range(0, len(text), 4):
        assert checker.push(text[i : i + 4]) is None

    assert time.thread_time() - started < 5  # searching the whole text at every piece takes minutes
    assert checker.safe_length == 200_000 - 5000
