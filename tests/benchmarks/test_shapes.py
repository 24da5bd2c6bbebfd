"""`benchmarks.shapes` on a host without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import shapes
from server.cli.bench.engine.options import shapes as shape_names
from server.cli.command_settings import settings_of
from server.cli.commands import command_parser


def read_options(flags):
    arguments = ["bench", "engine", *flags]
    return command_parser(arguments).parse_args(arguments)


def run(monkeypatch, tmp_path, *flags):
    arguments = ["shapes", f"--out={tmp_path}", "--commit=abc", "--device=cpu", *flags]
    monkeypatch.setattr(sys, "argv", arguments)
    shapes.main()


def measured(command):
    """Write the result that the command in a child process would write."""
    file = next(word for word in command if word.startswith("--json=")).partition("=")[2]
    rows = [
        {"model": "x", "metric": "ready_s", "batch": 1, "value": 5.1, "roofline": None},
        {"model": "x", "metric": "ms_per_token", "batch": 1, "value": 0.432, "roofline": 0.19,
         "prompt_tokens": 192, "steps": 128},
        {"model": "x", "metric": "decode_tok_s", "batch": 256, "value": 179000.0,
         "roofline": 0.38, "prompt_tokens": 192, "steps": 128},
        {"model": "x", "metric": "ttft_ms", "batch": 1, "value": 5.7, "roofline": None,
         "prompt_tokens": 4096},
    ]  # fmt: skip
    Path(file).write_text(json.dumps({"rows": rows, "plan": {"decode": "a"}, "dtype": "bfloat16"}))


def test_the_engine_command_has_valid_flags_and_measures_every_column():
    options = read_options(
        shapes.options("smollm2-360m", "cuda", ["--quantization=fp8", "--steps=32"])
    )

    assert settings_of(options, "bench engine").quantization == "fp8"
    assert (options.prompt_tokens, options.steps, options.idle_seconds) == (192, 32, 0.05)
    assert [f"{kind}{size}" for several in options.workloads for kind, size in several] == [
        *shapes.COLUMNS
    ]


def test_the_table_has_a_value_and_its_share_of_the_roofline_for_each_workload(
    monkeypatch, tmp_path, capsys
):
    def child(command, **_):
        measured(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(shapes.subprocess, "run", child)

    run(monkeypatch, tmp_path, "--shapes", "qwen3-4b", "mistral-7b", "--quantization=fp8")

    printed = capsys.readouterr().out
    assert "| qwen3-4b | 0.432 (19%) | - | - | 179,000 (38%) | 5.7 |" in printed
    assert printed.count("--quantization=fp8") == 2
    record = json.loads((tmp_path / "cpu-shapes-abc.json").read_text())
    assert {row["model"] for row in record["rows"]} == {"qwen3-4b", "mistral-7b"}
    assert record["shapes"]["mistral-7b"]["plan"] == {"decode": "a"}
    assert record["rows"][3]["workload"] == "ttft4096"


def test_all_shapes_are_measured_by_default_although_some_fail(monkeypatch, tmp_path, capsys):
    ran = []

    def child(command, timeout, **_):
        ran.append(command)
        if "--model=qwen3-4b" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        status = int("--model=gemma-3-1b" in command)
        if not status:
            measured(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(shapes.subprocess, "run", child)

    with pytest.raises(
        SystemExit, match=r"gemma-3-1b failed: exit status 1; qwen3-4b failed: .*9 s"
    ):
        run(monkeypatch, tmp_path, "--timeout=9")

    assert len(ran) == len(shapes.SHAPES) == len(set(shapes.SHAPES) & {*shape_names()})
    assert "| gemma-3-1b | - |" in capsys.readouterr().out
    record = json.loads((tmp_path / "cpu-shapes-abc.json").read_text())
    assert set(record["failed"]) == {"qwen3-4b", "gemma-3-1b"}


def test_an_unknown_shape_is_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--shapes", "gpt-5")

    assert "gpt-5" in capsys.readouterr().err
