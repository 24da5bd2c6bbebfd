"""How many front ends serve by default."""

import pytest

from model.device.cpus import UsableCPUs
from server.cli.front_end import count as module
from server.cli.front_end.count import front_end_count


@pytest.fixture
def machine(monkeypatch):
    def describe(logical, gpu):
        monkeypatch.setattr(module, "usable_cpus", lambda: UsableCPUs(logical, logical))
        monkeypatch.setattr(module, "may_have_gpu", lambda: gpu)
        monkeypatch.setattr(module.sys, "platform", "linux")

    return describe


@pytest.mark.parametrize(("logical", "count"), [(1, 1), (2, 1), (8, 2), (16, 4), (64, 4)])
def test_with_a_gpu_there_is_one_for_four_processors_up_to_four(machine, logical, count):
    machine(logical, gpu=True)

    assert front_end_count(None, "auto") == front_end_count(None, "cuda") == count
    assert front_end_count(None, "cpu") == 1


@pytest.mark.parametrize(("logical", "count"), [(8, 2), (24, 6), (128, 6)])
def test_a_second_engine_has_up_to_two_more(machine, logical, count):
    machine(logical, gpu=True)

    assert front_end_count(None, "auto", num_engines=2) == count


def test_without_a_gpu_there_is_one(machine):
    machine(64, gpu=False)

    assert front_end_count(None, "auto") == 1


def test_a_given_number_is_taken(machine):
    machine(64, gpu=False)

    assert front_end_count(7, "cpu") == 7


def test_other_systems_have_one(machine, monkeypatch):
    machine(64, gpu=True)
    monkeypatch.setattr(module.sys, "platform", "darwin")

    assert front_end_count(None, "auto") == 1
