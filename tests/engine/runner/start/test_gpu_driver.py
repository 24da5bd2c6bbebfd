"""Opening the GPU through the driver; errors of the driver are ignored."""

import ctypes

import pytest

from server.engine.runner.start.gpu_driver import open_gpu


class Driver:
    """A driver on which one call fails."""

    def __init__(self, refused=None):
        self.refused = refused
        self.called = []

    def __getattr__(self, name):
        def call(*_):
            self.called.append(name)
            return 999 if name == self.refused else 0

        return call


CALLS = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize(("refused", "count"), [(None, 3), ("cuInit", 1), ("cuDeviceGet", 2)])
def test_driver_calls_stop_at_the_first_that_fails(monkeypatch, refused, count):
    driver = Driver(refused)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: driver)

    open_gpu()

    assert driver.called == CALLS[:count]


def test_a_machine_without_a_driver_is_not_an_error(monkeypatch):
    def missing(_name):
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)

    open_gpu()
