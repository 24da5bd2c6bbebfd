"""Drafts come from the text of a sequence, and from earlier answers of the same part of the prefix cache."""

import msgspec
import pytest

from server.engine.core.limits import SchedulerConfig
from server.engine.core.memory.block_manager import BlockManager
from server.engine.core.schedule import draft
from server.engine.core.schedule.draft import NO_DRAFT, NUM_MATCH_CLASSES, LookupDrafter
from server.engine.core.schedule.scheduler import Scheduler
from server.engine.core.sequence import Sequence
from tests.engine.core.bookkeeping import make_request, make_sequence


class Drafter(LookupDrafter):
    """Begins a step with each proposal."""

    def propose(self, sequence, limit):
        self.begin_step()
        return super().propose(sequence, limit)


def ended(drafter, request_id, prompt, answer, **options):
    sequence = make_sequence(request_id, prompt, 100, **options)
    sequence.token_ids += answer
    drafter.forget(sequence)
    return sequence


def test_a_draft_continues_what_stands_in_the_prompt():
    sequence = make_sequence(1, [1, 2, 3, 4, 5, 6, 9, 1, 2, 3])

    assert Drafter().propose(sequence, 2).tokens == (4, 5)
    assert Drafter().propose(sequence, 3).match_class == 0


def test_a_draft_follows_the_tokens_that_come():
    drafter = Drafter()
    sequence = make_sequence(1, [*range(30), 50, 7, 8, 9])
    found = []
    for _ in range(12):
        proposed = drafter.propose(sequence, 4)
        found.append(proposed)
        sequence.token_ids.append(proposed.tokens[0])

    assert sequence.token_ids[-12:] == list(range(10, 22))
    classes = [it.match_class for it in found]
    assert classes == sorted(classes)
    assert classes[-1] == NUM_MATCH_CLASSES - 2


def test_a_text_without_repetition_has_no_draft():
    drafter = Drafter()
    sequence = make_sequence(1, 40)

    assert drafter.propose(sequence, 4) == NO_DRAFT
    assert drafter.propose(make_sequence(2, [1, 2]), 4) == NO_DRAFT


def test_an_earlier_answer_is_proposed_to_a_prompt_that_ends_as_its_own():
    drafter = Drafter()
    ended(drafter, 1, [1, 2, 3], [4, 5, 6, 7])

    assert drafter.propose(make_sequence(2, [9, 1, 2, 3]), 9).tokens == (4, 5, 6, 7)
    assert drafter.propose(make_sequence(3, [8, 4, 5, 6]), 1).tokens == (7,)


def test_the_prompt_of_an_earlier_request_is_not_proposed():
    drafter = Drafter()
    ended(drafter, 1, [11, 12, 13, 14, 15, 16], [4, 5, 6, 7])

    assert drafter.propose(make_sequence(2, [11, 12, 13]), 4) == NO_DRAFT


@pytest.mark.parametrize("others", [{"salt": "a"}, {"salt": None}])
def test_answers_are_shared_within_a_cache_salt_only(others):
    drafter = Drafter()
    ended(drafter, 1, [1, 2, 3], [4, 5, 6, 7], **others)

    assert drafter.propose(make_sequence(2, [1, 2, 3], salt="b"), 4) == NO_DRAFT
    assert drafter.propose(make_sequence(3, [1, 2, 3], **others), 4).tokens == (4, 5, 6, 7)


def test_the_answers_of_a_client_are_proposed_to_itself_only():
    drafter = Drafter()
    ended(drafter, 1, [1, 2, 3], [4, 5, 6, 7], client="a")

    assert drafter.propose(make_sequence(2, [1, 2, 3], client="b"), 4) == NO_DRAFT
    assert drafter.propose(make_sequence(3, [1, 2, 3], client="a"), 4).tokens == (4, 5, 6, 7)


@pytest.mark.parametrize("caches", [True, False])
def test_answers_are_kept_where_the_prefix_cache_keeps_blocks(caches):
    blocks = BlockManager(8, 4, enable_prefix_caching=caches)
    drafter = Scheduler(SchedulerConfig(4, 64, 100), blocks).drafts.drafter
    ended(drafter, 1, [1, 2, 3], [4, 5, 6, 7])
    drafter.begin_step()

    assert bool(drafter.propose(make_sequence(2, [1, 2, 3]), 4).tokens) is caches


def test_a_step_indexes_a_few_thousand_tokens_of_all_texts_together():
    drafter = LookupDrafter()
    sequences = [make_sequence(i, list(range(3000)) * 2) for i in range(4)]
    drafter.begin_step()
    found = [drafter.propose(sequence, 1).tokens for sequence in sequences]
    for _ in range(6):
        drafter.begin_step()
        for sequence in sequences:
            drafter.propose(sequence, 1)

    assert found == [(0,), (), (), ()]
    assert all(drafter.propose(sequence, 1).tokens == (0,) for sequence in sequences)


def test_the_memory_of_running_texts_is_bounded(monkeypatch):
    monkeypatch.setattr(draft, "_MOST_INDEXED_TEXTS", 1000)
    drafter = Drafter(pools=False)
    sequences = [make_sequence(i, 600) for i in range(4)]
    for sequence in sequences * 3:
        drafter.propose(sequence, 1)

    assert sum(text.num_indexed for text in drafter._texts.values()) == 1000
    for sequence in sequences[:2]:
        drafter.forget(sequence)
    drafter.propose(sequences[2], 1)
    drafter.propose(sequences[3], 1)
    assert sum(text.num_indexed for text in drafter._texts.values()) == 1000


class BrokenMatcher:
    def forced_tokens(self):
        raise RuntimeError("broken")


def test_a_grammar_that_cannot_be_read_ahead_forces_nothing(caplog):
    sequence = make_sequence(1, 9, grammar="{}", logprobs=True)
    sequence.matcher = BrokenMatcher()

    assert Drafter().propose(sequence, 2) == NO_DRAFT
    assert "cannot be read ahead" in caplog.text


def test_without_pools_no_answer_is_kept():
    drafter = Drafter(pools=False)
    ended(drafter, 1, [1, 2, 3], [4, 5, 6, 7])

    assert drafter.propose(make_sequence(2, [1, 2, 3]), 4) == NO_DRAFT


def test_the_longer_match_decides_between_the_own_text_and_an_earlier_answer():
    drafter = Drafter()
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
    drafter = Drafter()
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
    drafter = Drafter()
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

    assert Drafter().propose(sequence, 2).tokens == expected


def predicted(prediction, prompt=(1, 2), output=()):
    request = make_request(1, prompt, 50)
    sequence = Sequence(msgspec.structs.replace(request, prediction=list(prediction)))
    sequence.token_ids += output
    return sequence


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], (7, 8, 9)),
        ([7], (8, 9, 10)),
        ([7, 8], (9, 10, 11)),
        ([7, 8, 9], (10, 11, 12)),
        ([5], ()),
        ([7, 5], ()),
        ([5, 8, 9, 10], (11, 12, 13)),
        ([7, 8, 9, 10, 11, 12, 13], ()),
    ],
)
def test_a_prediction_is_followed_from_its_beginning_and_from_where_the_output_meets_it(
    output, expected
):
    sequence = predicted(range(7, 14), output=output)

    assert Drafter().propose(sequence, 3).tokens == expected


def test_the_longest_match_decides_between_prediction_and_own_text():
    sequence = predicted([4, 1, 2, 3, 50], prompt=[9, 1, 2, 3, 60, 4, 1, 2, 3])
    draft = Drafter().propose(sequence, 1)
    assert (draft.tokens, draft.is_predicted) == ((50,), True)

    sequence = predicted([4, 1, 2, 3, 50], prompt=[9, 1, 2, 3, 60, 9, 1, 2, 3])
    draft = Drafter().propose(sequence, 1)
    assert (draft.tokens, draft.is_predicted) == ((60,), False)


def test_the_beginning_of_a_prediction_is_predicted_and_an_earlier_answer_is_not():
    drafter = Drafter()
    assert drafter.propose(predicted([7, 8, 9]), 3).is_predicted

    earlier = predicted([], output=[5, 6, 7, 8, 9])
    drafter.propose(earlier, 1)
    drafter.forget(earlier)
    draft = drafter.propose(predicted([20, 21], prompt=[3], output=[5, 6, 7]), 2)

    assert (draft.tokens, draft.is_predicted) == ((8, 9), False)
