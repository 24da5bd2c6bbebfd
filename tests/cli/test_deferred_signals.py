"""Signals that arrive during a critical section are raised at its end."""

from __future__ import annotations

import signal

import pytest

from server.cli.deferred_signals import deferred_signals


@pytest.fixture
def came():
    """Return the list of handled signals."""
    handled = []
    before = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    yield handled
    signal.signal(signal.SIGTERM, before)


def test_a_signal_is_raised_after_the_block(came):
    with deferred_signals(signal.SIGTERM):
        signal.raise_signal(signal.SIGTERM)
        assert not came

    assert came == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)
    assert len(came) == 2


def test_a_signal_is_raised_after_a_block_that_fails(came):
    def begin():
        with deferred_signals(signal.SIGTERM):
            signal.raise_signal(signal.SIGTERM)
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        begin()

    assert came == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_signals(signal.SIGINT):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
