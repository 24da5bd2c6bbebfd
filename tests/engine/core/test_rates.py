"""Rates under load: what is known after how much, and that a slow start and a burst do not make them too low."""

from __future__ import annotations

import pytest

from server.engine.core.rates import Rate

PLACES = 256


def add(rate, times, *arguments):
    for _ in range(times):
        rate.add(*arguments)


def test_a_rate_is_unknown_until_two_windows_have_passed():
    rate = Rate()
    for _ in range(9):
        rate.add(10, 0.1)
        assert rate.value == 0.0
    rate.add(10, 0.1)
    assert rate.value == pytest.approx(100.0)


def test_slow_first_steps_do_not_count():
    rate = Rate()
    rate.add(8192, 2.0)
    assert rate.value == 0.0
    add(rate, 25, 8192, 0.02)
    assert rate.value == pytest.approx(8192 / 0.02)


def test_a_slow_moment_does_not_count_but_a_slow_engine_does():
    rate = Rate()
    add(rate, 60, 100, 0.1)
    rate.add(100, 2.0)
    assert rate.value == pytest.approx(1000.0)
    add(rate, 4, 100, 2.0)
    assert rate.value >= 100.0
    add(rate, 3, 100, 2.0)
    assert rate.value == pytest.approx(50.0)


def test_a_prompt_whose_chunks_become_slower_has_the_rate_of_all_of_them():
    rate = Rate()
    for _ in range(8):
        for chunk in range(16):
            rate.add(2048, 0.10 + 0.05 * chunk)
    assert rate.value == pytest.approx(16 * 2048 / (16 * 0.10 + 120 * 0.05), rel=0.6)


def test_a_burst_of_sequences_has_the_rate_of_all_that_began_together():
    rate = Rate()
    for turnover in range(4):
        for _ in range(100):
            rate.add(0, 0.01, PLACES)
            # All may end at once. So few as have ended do not say how long the others take.
            assert rate.value == 0.0 or rate.value >= 0.99 * PLACES / 1.02
        rate.add(PLACES - 6, 0.01, PLACES)
        rate.add(6, 0.01, PLACES)
        assert turnover == 0 or rate.value <= 2.0 * PLACES / 1.02
    add(rate, 1000, 2.5, 0.01, PLACES)
    assert rate.value == pytest.approx(250.0, rel=0.01)


def test_sequences_that_take_much_longer_than_those_before_lower_the_rate_before_they_end():
    rate = Rate()
    add(rate, 2, 4, 0.5, 4)
    assert rate.value == pytest.approx(8.0)
    found = []
    for _ in range(20):
        rate.add(0, 1.0, 4)
        found.append(rate.value)
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(4 / 20)
    rate.add(4, 1.0, 4)
    assert rate.value <= 8 / 21, "it does not rise to that of the window before when they end"
    rate.add(4, 21.0, 4)
    assert rate.value == pytest.approx(4 / 21)


def test_the_first_sequences_lower_the_rate_before_they_end():
    rate = Rate()
    add(rate, 10, 0, 1.0, 4)
    assert rate.value == pytest.approx(0.4)


def test_a_second_turnover_is_not_taken_to_be_much_faster_than_the_first():
    rate = Rate()
    for _ in range(2):
        add(rate, 59, 0, 1.0, 4)
        rate.add(4, 1.0, 4)
        assert rate.value <= 2 * 4 / 60
    add(rate, 30, 0, 1.0, 4)
    assert rate.value <= 4 / 60


def test_what_an_interruption_ends_is_not_counted():
    rate = Rate()
    add(rate, 2, 100, 0.5)
    rate.add(1, 4.9)
    rate.interrupt()
    add(rate, 2, 1000, 2.5)
    assert rate.value == pytest.approx(400.0)


def test_nothing_in_a_long_time_leaves_a_rate_known():
    rate = Rate()
    add(rate, 2, 100, 0.5)
    add(rate, 100, 0, 1.0)
    assert rate.value == pytest.approx(200.0)


def test_short_bursts_raise_a_rate_that_has_become_too_low():
    rate = Rate()
    for _ in range(4):
        add(rate, 39, 0, 1.0, 4)
        rate.add(4, 1.0, 4)
    assert rate.value == pytest.approx(0.1)
    add(rate, 100, 4, 0.01, 4)  # a second, then the queue is empty
    rate.interrupt()
    assert rate.value == pytest.approx(400.0, rel=0.01)


def test_a_burst_that_ends_together_is_not_taken_to_be_much_faster():
    rate = Rate()
    for _ in range(3):
        add(rate, 99, 0, 0.1, PLACES)
        rate.add(PLACES, 0.1, PLACES)
    known = rate.value
    add(rate, 10, 0, 0.1, PLACES)
    rate.add(PLACES, 0.1, PLACES)
    assert rate.value <= known


def test_sequences_that_take_much_longer_lower_a_fast_rate_within_seconds():
    rate = Rate()
    add(rate, 2000, 4, 0.01, 4)
    assert rate.value == pytest.approx(400.0)
    add(rate, 10, 0, 1.0, 4)
    assert rate.value <= 0.5
