"""What a start reports within its phases: to the front end, and to the log."""

import logging

import pytest

from model import progress
from server.engine.runner.start import startup, startup_progress
from server.engine.runner.start.startup_progress import Phases


class Channel:
    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message.name)


@pytest.fixture
def channel(monkeypatch):
    monkeypatch.setattr(startup_progress, "_SAY_SECONDS", 0.0)
    return Channel()


@pytest.fixture
def every_line(monkeypatch, caplog):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    return caplog


def test_the_shards_and_bytes_of_loading_are_the_phase(channel, every_line):
    with startup._weights_progress(Phases(channel)) as show:
        show(2**30, 2**31, 2, 4)

    assert channel.sent == ["loading 2 of 4 shards, 1.0 GiB of 2.0 GiB"]
    assert "loading the weights: 1.0 GiB of 2.0 GiB (50%)" in every_line.text
    assert "shard 2 of 4" in every_line.text


def test_a_single_file_is_called_the_weights_and_quick_loading_has_no_line(channel, caplog):
    caplog.set_level(logging.INFO)
    with startup._weights_progress(Phases(channel)) as show:
        show(2**19, 2**20, 1, 1)

    assert channel.sent == ["loading the weights, 512.0 KiB of 1.0 MiB"]
    assert caplog.text == ""


def test_recordings_are_the_phase_of_a_ready_engine_until_the_last_one(channel, every_line):
    phases = Phases(channel)
    for number in range(3):
        phases.recorded(number, 3)
    phases.recorded(3, 3)
    phases.recorded(3, 3)

    assert channel.sent == [*(f"recording step {number} of 3" for number in (1, 2, 3)), "ready"]
    assert "recording step 3 of 3" in every_line.text


def test_a_rank_that_does_not_lead_logs_no_progress(channel, every_line):
    Phases(channel, shown=False).say("compiling kernels, 1 of 2 (decode)")

    assert every_line.text == ""
