"""Progress on a terminal and in a log."""

import io
import threading
import types

import pytest

from model import progress
from model.progress import Progress, Status, bytes_text, duration_text, watched
from tests.waiting import GIVE_UP

MIB = 2**20


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=terminal))
    return terminal


def test_a_log_has_a_line_every_few_seconds_with_amount_rate_and_time_left(clock):
    lines = []
    with Progress("loading", lines.append, 100 * MIB, done=20 * MIB, clock=clock) as shown:
        for clock.now, done in ((1.0, 30), (5.0, 40), (7.0, 50), (10.0, 60)):
            shown.update(done * MIB)

    assert lines == [
        "loading: 40.0 MiB of 100.0 MiB (40%), 4.0 MiB/s, 15 s left",
        "loading: 60.0 MiB of 100.0 MiB (60%), 4.0 MiB/s, 10 s left",
    ]


def test_work_that_is_counted_has_no_rate_but_the_time_so_far(clock):
    lines = []
    with Progress("sending", lines.append, 87, "requests", clock=clock) as shown:
        clock.now = 65.0
        shown.update(12, note="the third")

    assert lines == ["sending: 12 of 87 requests (14%), the third, 1 min 5 s so far"]


def test_a_stalled_download_has_no_time_left(clock):
    lines = []
    with Progress("loading", lines.append, 100, clock=clock) as shown:
        clock.now = 5.0
        shown.update(0)

    assert lines == ["loading: 0 B of 100 B (0%), 0 B/s"]


def test_a_terminal_has_one_bar_that_is_removed_and_no_lines(clock, terminal):
    lines = []
    with Progress("loading", lines.append, 100 * MIB, clock=clock) as shown:
        shown.update(1)
        assert terminal.getvalue() == ""  # work that ends at once has no bar
        clock.now = 20.0
        shown.update(50 * MIB, note="shard 2 of 4")

    text = terminal.getvalue()
    assert lines == []
    assert "loading:  50%" in text
    assert "50.0M/100M" in text
    assert "shard 2 of 4" in text
    assert "\n" not in text
    assert text.rsplit("\r", 2)[1].strip() == ""


def test_a_rank_that_does_not_lead_shows_nothing_on_a_terminal(clock, terminal):
    with Progress("loading", pytest.fail, 100, shown=False, clock=clock) as shown:
        clock.now = 20.0
        shown.update(50)
    status = Status(pytest.fail, shown=False, clock=clock)
    clock.now = 40.0
    status.show("compiling")

    assert terminal.getvalue() == ""


def test_a_status_is_a_line_every_few_seconds(clock):
    lines = []
    status = Status(lines.append, clock=clock)
    for clock.now, text in ((4.0, "one"), (6.0, "two"), (8.0, "three"), (12.0, "four")):
        status.show(text)
    status.clear()
    clock.now = 16.0
    status.show("five")

    assert lines == ["two, 6 s so far", "four, 12 s so far"]


def test_a_status_is_one_line_of_a_terminal(clock, terminal):
    status = Status(pytest.fail, clock=clock)
    for clock.now, text in ((0.1, "one"), (2.0, "two"), (4.0, "three")):
        status.show(text)
    status.clear()

    text = terminal.getvalue()
    assert "one" not in text
    assert "two, 2 s so far" in text
    assert "three, 4 s so far" in text
    assert "\n" not in text


def test_another_thread_shows_what_timed_work_does(monkeypatch):
    monkeypatch.setattr(progress, "_WATCH_SECONDS", 0.001)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    shown = threading.Event()

    with watched(Status(lambda text: text.startswith("work, ") and shown.set()), "work"):
        assert shown.wait(GIVE_UP)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.4 * 2**30, "1.4 GiB"), (2**60, "1048576.0 TiB")],
)  # fmt: skip
def test_bytes_have_a_binary_unit(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (7260, "2 h 1 min")]
)  # fmt: skip
def test_a_duration_has_at_most_two_units(seconds, text):
    assert duration_text(seconds) == text
