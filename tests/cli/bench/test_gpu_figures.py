"""`benchmarks.gpu` on a host without a GPU: its commands are valid for `tessera bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from server.cli.bench import result
from server.cli.command_settings import settings_of
from server.cli.commands import command_parser


def read_options(kind, flags):
    arguments = ["bench", kind, *flags]
    return command_parser(arguments).parse_args(arguments)


@pytest.mark.parametrize("name", gpu.ENGINE)
def test_the_engine_command_has_valid_flags(name):
    options = read_options("engine", [*gpu.ENGINE[name], "--json=results", "--commit=abc"])

    assert settings_of(options, "bench engine").model
    assert all(options.workloads)
    assert options.label == name


def test_the_load_command_has_valid_flags():
    load = gpu.load("http://127.0.0.1:8000")
    options = read_options("serve", [*load, "--json=results", "--commit=abc"])

    assert (options.concurrency, options.processes) == ([1, 64, 256], 2)
    assert (options.json, options.commit) == (Path("results"), "abc")


def test_a_failed_measurement_is_reported_and_the_others_run(monkeypatch, tmp_path, capsys):
    ran = []

    def run(command, **_):
        ran.append(command)
        return subprocess.CompletedProcess(command, int("--label=llama-3.2-1b" in command))

    def no_service(*_):
        raise SystemExit("the service did not start")

    monkeypatch.setattr(gpu.subprocess, "run", run)
    monkeypatch.setattr(gpu, "service", no_service)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "results")])

    with pytest.raises(SystemExit, match=r"^failed: llama-3.2-1b, http$"):
        gpu.main()

    assert len(ran) == len(gpu.ENGINE)
    printed = capsys.readouterr().out
    assert "$ tessera bench engine" in printed
    assert "the service did not start" in printed


def test_a_result_gets_its_default_name_in_a_new_folder(tmp_path):
    record = result.record("http", [], machine="a GPU", versions={}, command="x", commit="abc")

    in_folder = result.write(record, tmp_path / "results", "h100")
    in_file = result.write(record, tmp_path / "other" / "mine.json", "h100", "a-model")

    assert in_folder == tmp_path / "results" / "h100-http-abc.json"
    assert in_file == tmp_path / "other" / "mine.json"
    assert in_file.read_text() == in_folder.read_text()
