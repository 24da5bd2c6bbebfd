"""How many engine processes there are, and which GPU each sees."""

import pytest

from server.cli import service_parts as module
from server.cli.command_settings import read_settings
from server.cli.nvidia import count_gpus
from server.cli.service_parts import engine_environments
from server.cli.settings import Settings
from server.engine.core.start_checks import StartupError
from server.engine.link.spawn import gpu_variables


@pytest.fixture
def machine(monkeypatch):
    def describe(gpus, visible=None):
        monkeypatch.setattr(module, "may_have_gpu", lambda: gpus > 0)
        monkeypatch.setattr(module, "count_gpus", lambda: gpus)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return describe


def environments(number, device="auto"):
    return list(engine_environments(Settings(data_parallel=number, device=device)))


def gpus(*names):
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_engine_sees_one_gpu(machine, device):
    machine(4)

    assert environments(2, device) == gpus("0", "1")
    assert environments("auto", device) == gpus("0", "1", "2", "3")


def test_gpus_are_those_that_the_environment_allows(machine):
    machine(3, visible="2, GPU-5a,0")

    assert environments("auto") == gpus("2", "GPU-5a", "0")
    assert gpu_variables(1) == {"CUDA_VISIBLE_DEVICES": "GPU-5a"}


def test_more_engines_than_gpus_are_refused_with_both_numbers(machine):
    machine(1)
    with pytest.raises(StartupError, match=r"--data-parallel 2: .* and 1 is visible"):
        environments(2)
    machine(0)
    with pytest.raises(StartupError, match=r"--data-parallel 3: .* and 0 are visible"):
        environments(3, "cuda")


def test_on_a_cpu_the_number_is_taken_and_automatic_is_one(machine):
    machine(0)
    assert environments(4) == [{}] * 4
    assert environments("auto") == [{}]
    machine(2)
    assert environments(4, "cpu") == [{}] * 4
    assert environments("auto", "cpu") == [{}]


def test_by_default_the_gpus_are_not_counted(machine, monkeypatch):
    machine(2)
    monkeypatch.setattr(module, "count_gpus", lambda: pytest.fail("counted"))

    assert environments(1) == [{}]
    assert Settings().data_parallel == 1


def test_one_gpu_needs_no_environment(machine):
    machine(1)

    assert environments("auto") == [{}]


@pytest.mark.parametrize("value", ["0", "65", "two", "1.5", "-1", "", " ", "AUTO", "٣", "9" * 5000])
def test_other_values_are_refused(value, capsys):
    with pytest.raises(SystemExit):
        read_settings([f"--data-parallel={value}"])

    error = capsys.readouterr().err
    assert "--data-parallel (or TESSERA_DATA_PARALLEL)" in error
    assert "it must be a whole number from 1 to 64, or auto" in error


def test_values_are_read_from_flag_and_environment(monkeypatch):
    assert read_settings(["--data-parallel=auto"]).data_parallel is None
    monkeypatch.setenv("TESSERA_DATA_PARALLEL", "3")

    assert read_settings([]).data_parallel == 3


def test_without_a_driver_there_are_no_gpus():
    assert count_gpus("libabsent-of-tessera.so.1") == 0


@pytest.mark.parametrize("engines", ["2", "auto"])
def test_engines_and_ranks_cannot_be_combined(engines, capsys):
    with pytest.raises(SystemExit):
        read_settings([f"--data-parallel={engines}", "--tensor-parallel=2"])

    assert f"--data-parallel {engines} and --tensor-parallel 2" in capsys.readouterr().err
