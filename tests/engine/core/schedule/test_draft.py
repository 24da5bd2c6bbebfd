"""Drafts come from the text of a sequence, and from earlier answers of the same part of the prefix cache."""

import pytest

from server.engine.core.schedule import draft
from server.engine.core.schedule.draft import NO_DRAFT, NUM_CLASSES, LookupDrafter
from tests.engine.core.bookkeeping import make_sequence


def ended(drafter, request_id, prompt, answer, **options):
    sequence = make_sequence(request_id, prompt, 100, **options)
    sequence.token_ids += answer
    drafter.forget(sequence)
    return sequence


def test_a_draft_continues_what_stands_in_the_prompt():
    sequence = make_sequence(1, [1, 2, 3, 4, 5, 6, 9, 1, 2, 3])

    assert LookupDrafter().propose(sequence, 2).tokens == (4, 5)
    assert LookupDrafter().propose(sequence, 3).certainty == 0


def test_a_draft_follows_the_tokens_that_come():
    drafter = LookupDrafter()
    sequence = make_sequence(1, [*range(30), 50, 7, 8, 9])
    found = []
    for _ in range(12):
        proposed = drafter.propose(sequence, 4)
        found.append(proposed)
        sequence.token_ids.append(proposed.tokens[0])

    assert sequence.token_ids[-12:] == list(range(10, 22))
    certainties = [it.certainty for it in found]
    assert certainties == sorted(certainties)
    assert certainties[-1] == NUM_CLASSES - 2


def test_a_text_without_repetition_has_no_draft():
    drafter = LookupDrafter()
    sequence = make_sequence(1, 40)

    assert drafter.propose(sequence, 4) == NO_DRAFT
    assert drafter.propose(make_sequence(2, [1, 2]), 4) == NO_DRAFT


def test_an_earlier_answer_is_proposed_to_a_prompt_that_ends_as_its_own():
    drafter = LookupDrafter()
    ended(drafter, 1, [1, 2, 3], [4, 5, 6, 7])

    assert drafter.propose(make_sequence(2, [9, 1, 2, 3]), 9).tokens == (4, 5, 6, 7)
    assert drafter.propose(make_sequence(3, [8, 4, 5, 6]), 1).tokens == (7,)


def test_the_prompt_of_an_earlier_request_is_not_proposed():
    drafter = LookupDrafter()
    ended(drafter, 1, [11, 12, 13, 14, 15, 16], [4, 5, 6, 7])

    assert drafter.propose(make_sequence(2, [11, 12, 13]), 4) == NO_DRAFT


@pytest.mark.parametrize("others", [{"salt": "a"}, {"salt": None}])
def test_answers_are_shared_within_a_cache_salt_only(others):
    drafter = LookupDrafter()
    ended(drafter, 1, [1, 2, 3], [4, 5, 6, 7], **others)

    assert drafter.propose(make_sequence(2, [1, 2, 3], salt="b"), 4) == NO_DRAFT
    assert drafter.propose(make_sequence(3, [1, 2, 3], **others), 4).tokens == (4, 5, 6, 7)


def test_without_pools_no_answer_is_kept():
    drafter = LookupDrafter(pools=False)
    ended(drafter, 1, [1, 2, 3], [4, 5, 6, 7])

    assert drafter.propose(make_sequence(2, [1, 2, 3]), 4) == NO_DRAFT


def test_the_longer_match_decides_between_the_own_text_and_an_earlier_answer():
    drafter = LookupDrafter()
    ended(drafter, 1, [9, 1, 2, 3], [4, 4, 4, 4])

    own = make_sequence(2, [8, 1, 2, 3, 5, 6, 7, 8, 1, 2, 3])
    assert drafter.propose(own, 2).tokens == (5, 6)
    other = make_sequence(3, [8, 1, 2, 3, 5, 6, 7, 9, 1, 2, 3])
    assert drafter.propose(other, 2).tokens == (5, 6)  # three tokens in both: the own text
    ended(drafter, 4, [7, 9, 1, 2, 3], [4, 4, 4, 4])
    ended(drafter, 5, [0], [7, 9, 1, 2, 3, 4, 4])
    assert drafter.propose(other, 2).tokens == (4, 4)


def test_the_memory_of_answers_is_bounded(monkeypatch):
    monkeypatch.setattr(draft, "_MOST_POOLED", 100)
    monkeypatch.setattr(draft, "_MOST_POOLS", 1000)
    drafter = LookupDrafter()
    for number in range(300):
        first = 1000 * number
        ended(drafter, number, [1], range(first, first + 30), salt=str(number % 30))
        sizes = [len(it.token_ids) for it in drafter._pool_of.values()]
        assert sum(sizes) <= 1000 + 300
        assert max(sizes) <= 2 * 100 + 40

    newest = make_sequence(1000, [299_000, 299_001, 299_002], salt="29")
    oldest = make_sequence(1001, [299_000, 299_001, 299_002], salt="0")
    assert drafter.propose(newest, 2).tokens == (299_003, 299_004)
    assert drafter.propose(oldest, 2) == NO_DRAFT


def test_a_long_answer_is_kept_as_far_as_there_is_room(monkeypatch):
    monkeypatch.setattr(draft, "_MOST_POOLED", 50)
    drafter = LookupDrafter()
    ended(drafter, 1, [1, 2, 3], range(1000, 1090))

    assert drafter.propose(make_sequence(2, [1086, 1087, 1088]), 1).tokens == (1089,)
    assert drafter.propose(make_sequence(3, [1, 2, 3]), 1) == NO_DRAFT


class ForcingMatcher:
    def forced_tokens(self):
        return [5, 6, 7]


@pytest.mark.parametrize(("logprobs", "expected"), [(True, (5, 6)), (False, ())])
def test_tokens_that_a_grammar_forces_are_proposed_unless_they_need_no_step(logprobs, expected):
    sequence = make_sequence(1, 9, grammar="{}", logprobs=logprobs)
    sequence.matcher = ForcingMatcher()

    assert LookupDrafter().propose(sequence, 2).tokens == expected
