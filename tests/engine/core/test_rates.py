"""Rates under load: what is known after how much, and that a slow start and a burst do not make them too low."""

from __future__ import annotations

import pytest

from server.engine.core.rates import Rate


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
    for _ in range(25):
        rate.add(8192, 0.02)
    assert rate.value == pytest.approx(8192 / 0.02)


def test_a_slow_moment_does_not_count_but_a_slow_engine_does():
    rate = Rate()
    for _ in range(20):
        rate.add(100, 0.1)
    rate.add(100, 2.0)
    assert rate.value == pytest.approx(1000.0)
    rate.add(100, 2.0)
    assert rate.value == pytest.approx(50.0)


def test_a_burst_of_sequences_has_the_rate_of_all_that_began_together():
    rate = Rate()
    for _ in range(2):
        for _ in range(100):
            rate.add(0, 0.01, pending=256)
            # 256 may end at once. So few as have ended do not say how long the others take.
            assert rate.value == 0.0 or rate.value >= 255.0
        rate.add(250, 0.01, pending=256)
        rate.add(6, 0.01, pending=256)
    assert rate.value == pytest.approx(256 / 1.02)


def test_sequences_that_take_much_longer_than_those_before_lower_the_rate_before_they_end():
    rate = Rate()
    for _ in range(4):
        rate.add(4, 0.5, pending=4)
    assert rate.value == pytest.approx(8.0)
    for seconds in range(1, 21):
        rate.add(0, 1.0, pending=4)
        assert rate.value == pytest.approx(min(8.0, 4 / seconds))
    rate.add(4, 1.0, pending=4)
    rate.add(4, 20.0, pending=4)
    assert rate.value == pytest.approx(0.2)


def test_the_first_sequences_may_lower_the_rate_before_they_end():
    rate = Rate()
    for _ in range(10):
        rate.add(0, 1.0, pending=4)
    assert rate.value == pytest.approx(0.4)
