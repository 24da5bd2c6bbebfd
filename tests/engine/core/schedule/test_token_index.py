"""The index finds the longest of the latest matches, and never passes the end of a text."""

import random

import pytest

from server.engine.core.schedule.token_index import END, MOST_MATCHED, ORDER, TokenIndex


def index_of(token_ids, first=0):
    index = TokenIndex(token_ids, first)
    while not index.is_complete:
        index.update(4096)
    return index


def expected_match(token_ids, text):
    """Return the length of the longest match, found by looking everywhere."""
    best = 0
    for place in range(ORDER, len(token_ids)):
        length = 0
        while (
            length < min(place, len(text), MOST_MATCHED)
            and token_ids[place - 1 - length] == text[-1 - length] >= 0
        ):
            length += 1
        best = max(best, length)
    return best if best >= ORDER else 0


@pytest.mark.parametrize("seed", range(20))
def test_a_match_is_as_long_as_the_tokens_before_its_place_are_equal(seed):
    rng = random.Random(seed)
    token_ids = [rng.choice((0, 1, 2, END)) for _ in range(60)]
    text = [rng.randrange(3) for _ in range(8)]

    match = index_of(token_ids).longest_match(text)

    # Of many places with the same n-gram only the latest are looked at.
    assert (match is None) == (expected_match(token_ids, text) == 0)
    if match is not None:
        assert token_ids[match.place - match.length : match.place] == text[-match.length :]
        assert match.length <= expected_match(token_ids, text)


def test_the_longest_match_is_preferred_and_then_the_last():
    token_ids = [9, 1, 2, 3, 10, 5, 1, 2, 3, 11, 5, 1, 2, 3, 12, 7]

    assert index_of(token_ids).longest_match([9, 1, 2, 3]) == (4, 4)
    assert index_of(token_ids).longest_match([8, 1, 2, 3]) == (14, 3)
    assert index_of(token_ids).longest_match([2, 3]) is None


def test_a_sequence_finds_itself_only_before_its_end():
    token_ids = [1, 2, 3, 4]
    index = index_of(token_ids)

    assert index.longest_match(token_ids) is None
    token_ids += [2, 3, 4]
    index.update(4096)
    assert index.longest_match(token_ids) == (4, 3)
    assert index.continuation(4, 5) == (2, 3, 4, 2, 3)


def test_tokens_are_entered_as_they_come():
    rng = random.Random(1)
    token_ids = [rng.randrange(4) for _ in range(9)]
    grown = TokenIndex(list(token_ids))
    for _ in range(50):
        grown.update(4096)
        text = [rng.randrange(4) for _ in range(6)]
        assert grown.longest_match(text) == index_of(grown.token_ids).longest_match(text)
        grown.token_ids.append(rng.randrange(4))


def test_a_long_text_is_entered_in_parts():
    index = TokenIndex(list(range(10_000)))

    index.update(4096)

    assert not index.is_complete
    assert index.longest_match([1, 2, 3]) == (4, 3)
    assert index.longest_match([9001, 9002, 9003]) is None
    index.update(4096)
    index.update(4096)
    assert index.longest_match([9001, 9002, 9003]) == (9004, 3)


def test_an_index_may_begin_within_a_text():
    token_ids = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 9]

    assert index_of(token_ids, 1).longest_match([1, 2, 3]) == (10, 3)
    assert index_of(token_ids, 1).longest_match([4, 5, 6]) == (6, 3)
    assert index_of(token_ids, 5).longest_match([4, 5, 6]) is None


def test_no_continuation_passes_the_end_of_a_text():
    index = index_of([1, 2, 3, 4, 5, END, 6, 7, 8])

    assert index.longest_match([1, 2, 3]) == (3, 3)
    assert index.continuation(3, 7) == (4, 5)
    assert index.continuation(5, 7) == ()


def test_a_place_that_was_right_before_is_found_although_many_others_are_later():
    loop = [1, 2, 3]
    token_ids = [50, 51, 52, 1, 2, 3, 60, *[*loop, 7] * 40]
    index = index_of(token_ids)
    text = [50, 51, 52, 1, 2, 3]

    assert index.longest_match(text).length == ORDER
    assert index.longest_match(text, near=6) == (6, 6)
    assert index.longest_match(text, near=10**9).length == ORDER
