"""The limit of an activity depends on what it is, and on how long steps of its size have taken."""

import math

import pytest

from server.engine.core.progress import Activity, Progress, start_seconds


def allowed(progress, num_tokens, activity=Activity.WAITING):
    progress.begin(activity, num_tokens)
    return progress.allowed_seconds(60.0)


def test_waiting_for_requests_has_no_limit():
    assert allowed(Progress(), 0, Activity.IDLE) == math.inf


@pytest.mark.parametrize("activity", [Activity.STARTING, Activity.RECORDING])
def test_starting_and_recording_have_ten_times_the_limit(activity):
    assert allowed(Progress(), 0, activity) == start_seconds(60.0) == 600.0


def test_the_first_step_has_ten_times_the_limit():
    assert allowed(Progress(), 512, Activity.LAUNCHING) == 600.0


@pytest.mark.parametrize("activity", [Activity.SCHEDULING, Activity.MESSAGES])
def test_bookkeeping_has_the_plain_limit(activity):
    assert allowed(Progress(), 0, activity) == 60.0


def test_short_steps_have_the_plain_limit_and_slow_ones_twenty_times_their_duration():
    progress = Progress()
    progress.end_step(1, 0.005)
    progress.end_step(512, 20.0)

    assert allowed(progress, 1) == 60.0
    assert allowed(progress, 512) == 400.0


def test_a_size_without_a_step_has_the_limit_of_a_larger_one_or_in_proportion_to_a_smaller_one():
    progress = Progress()
    progress.end_step(16, 8.0)

    assert allowed(progress, 4) == 160.0
    assert allowed(progress, 64) == 640.0


def test_one_slow_step_does_not_raise_the_limit_for_ever():
    progress = Progress()
    progress.end_step(8, 100.0)
    assert allowed(progress, 8) == 2000.0
    for _ in range(1000):
        progress.end_step(8, 0.01)

    assert allowed(progress, 8) == 60.0


def test_every_activity_counts_as_progress():
    progress = Progress()
    for number, activity in enumerate(Activity, 1):
        progress.begin(activity)
        assert progress.count == number
