"""The search for a GPU without PyTorch."""

import sys

import pytest

from server.cli.nvidia import may_have_gpu

ABSENT = "libabsent-of-tessera.so.1"


def test_without_a_device_and_without_a_driver_there_is_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")

    assert not may_have_gpu(tmp_path, ABSENT)


@pytest.mark.parametrize("node", ["nvidia0", "nvidiactl", "nvidia-uvm", "dxg", "nvhost-gpu", "kfd"])
def test_any_device_of_a_driver_may_be_a_gpu(tmp_path, node):
    (tmp_path / node).touch()

    assert may_have_gpu(tmp_path, ABSENT)


@pytest.mark.skipif(sys.platform != "linux", reason="names a library of Linux")
def test_a_driver_alone_may_have_a_gpu(tmp_path):
    assert may_have_gpu(tmp_path, "libc.so.6")


def test_other_systems_may_have_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")

    assert may_have_gpu(tmp_path, ABSENT)
