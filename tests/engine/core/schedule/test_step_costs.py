"""Times of steps are learnt by their number of tokens."""

import pytest

from server.engine.core.schedule.step_costs import StepCosts


def costs_of(seconds):
    """Return costs after some steps of each number of tokens, which took as long."""
    costs = StepCosts(64)
    for num_tokens, time in seconds.items():
        for _ in range(3):
            costs.note(num_tokens, time)
    return costs


def test_one_long_step_does_not_keep_others_from_being_tried():
    costs = costs_of({1: 4.0})
    costs.note(8, 1000.0)

    assert costs.seconds(8) == pytest.approx(11.0)
    assert costs.seconds(4) == pytest.approx(7.0)
    costs.note(8, 9.0)
    assert costs.seconds(8) == 9.0
    costs.note(8, 10.0)
    assert costs.seconds(8) == 9.0
    assert 4.0 < costs.seconds(4) < 9.0


def test_nothing_is_known_before_the_first_step():
    assert StepCosts(8).seconds(3) == 0.0


def test_more_tokens_cost_little_until_a_step_shows_it():
    costs = costs_of({1: 4.0})

    assert costs.seconds(1) == 4.0
    assert costs.seconds(4) == pytest.approx(7.0)
    assert costs.seconds(2) < costs.seconds(8)


def test_times_are_linear_between_measured_numbers_and_beyond_them():
    costs = costs_of({2: 4.0, 6: 8.0})

    assert [costs.seconds(n) for n in (2, 3, 4, 6, 8)] == [4.0, 5.0, 6.0, 8.0, 10.0]
    assert costs.seconds(1) == pytest.approx(3.5)


def test_a_step_that_was_interrupted_counts_little():
    costs = StepCosts(8)
    costs.note(1, 100.0)
    for _ in range(5):
        costs.note(1, 1.0)
    known = costs.seconds(1)
    costs.note(1, 1000.0)

    assert known == pytest.approx(1.0)
    assert costs.seconds(1) < 1.1


def test_a_mean_follows_the_steps():
    costs = StepCosts(8)
    for seconds in [1.0] * 10 + [2.0] * 60:
        costs.note(1, seconds)

    assert costs.seconds(1) == pytest.approx(2.0, rel=0.02)


def test_what_no_step_has_shown_for_long_is_forgotten():
    costs = StepCosts(8)
    for _ in range(5):
        costs.note(4, 50.0)
    for _ in range(20_000):
        costs.note(1, 1.0)

    assert costs.seconds(4) == pytest.approx(1.75)


@pytest.mark.parametrize("num_tokens", [0, 9])
def test_steps_of_other_sizes_are_not_learnt(num_tokens):
    costs = StepCosts(8)
    costs.note(num_tokens, 1.0)

    assert costs.seconds(1) == 0.0
