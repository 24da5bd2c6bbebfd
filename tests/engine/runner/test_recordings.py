"""Which recordings are made, when, and which one a step takes."""

import pytest

from server.engine.runner.recordings import Recordings


class Kind:
    def __init__(self, key, made):
        self.key, self.replay, self._made = key, None, made

    def record(self):
        if self.key < 0:
            raise RuntimeError("out of memory")
        self._made.append(self.key)
        return object()


@pytest.fixture
def made():
    return []


def recordings(made, first=()):
    return Recordings(lambda key: Kind(key, made), first)


def test_they_are_made_in_the_order_given_and_one_that_was_missed_before_the_others(made):
    kinds = recordings(made, [1, 2, 3])
    assert kinds.record_next()

    assert kinds.find([3]) is None
    while kinds.record_next():
        pass

    assert made == [1, 3, 2]
    assert kinds.find([3]).key == 3
    assert not kinds.record_next()


def test_the_third_step_that_is_launched_without_any_makes_its_own(made):
    kinds = recordings(made, [1])

    assert [kinds.find([5]) for _ in range(3)] == [None] * 3

    assert made == [5]
    assert kinds.find([5]).key == 5


def test_a_step_takes_a_larger_one_until_its_own_is_made(made):
    kinds = recordings(made, [8])
    kinds.record_next()

    found = [kinds.find(iter([5, 6, 8, 9])).key for _ in range(64)]

    assert found == [8] * 64
    assert made == [8, 5]
    assert kinds.find([5, 6, 8, 9]).key == 5


def test_steps_that_never_wait_have_theirs_made_next_in_idle_time(made):
    kinds = recordings(made, [1, 2])

    assert [kinds.find([5, 8], waits=False) for _ in range(100)] == [None] * 100
    assert made == []
    kinds.record_next()

    assert made == [5]


def test_what_a_larger_one_serves_is_made_next_in_idle_time(made):
    kinds = recordings(made, [8, 1, 2])
    kinds.record_next()

    kinds.find([5, 8])
    kinds.record_next()

    assert made == [8, 5]


def test_after_one_that_cannot_be_made_no_more_are_tried_and_those_there_are_stay(made):
    kinds = recordings(made, [1, -1, 2])

    while kinds.record_next():
        pass

    assert made == [1]
    assert [kinds.find([4]) for _ in range(5)] == [None] * 5
    assert kinds.find([4, 1]).key == 1
    assert list(kinds.recorded) == [1]
