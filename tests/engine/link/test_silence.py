"""Silence is measured in the watcher's own ticks."""

from server.engine.link.silence import SilenceTimer, tick_seconds


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def timer(clock):
    return SilenceTimer(1.0, clock)


def test_silence_adds_up_until_a_sign_of_life():
    clock = Clock()
    watched = timer(clock)
    silences = []
    for alive in (False, False, False, True, False):
        clock.now += 1.0
        silences.append(watched.tick(alive=alive))

    assert silences == [1.0, 2.0, 3.0, 0.0, 1.0]


def test_a_pause_of_the_watcher_counts_for_two_periods_however_long_it_was():
    clock = Clock()
    watched = timer(clock)
    clock.now += 3600.0  # a suspended machine
    assert watched.tick(alive=False) == 2.0

    clock.now += 1.0
    assert watched.tick(alive=True) == 0.0


def test_repeated_pauses_do_not_hide_a_hang():
    clock = Clock()
    watched = timer(clock)
    for _ in range(30):
        clock.now += 100.0
        silent = watched.tick(alive=False)

    assert silent == 60.0


def test_ticks_are_frequent_enough_for_the_limit():
    assert tick_seconds(60.0) == 1.0
    assert tick_seconds(0.8) == 0.1
