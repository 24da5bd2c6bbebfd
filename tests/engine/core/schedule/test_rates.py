"""Rates under load: what is known after how much, and that a slow start and slow moments do not make them too low."""

from __future__ import annotations

import pytest

from server.engine.core.schedule.rates import Rate


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


def test_nothing_in_a_long_time_leaves_a_rate_known():
    rate = Rate()
    add(rate, 2, 100, 0.5)
    add(rate, 100, 0, 1.0)
    assert rate.value == pytest.approx(200.0)
