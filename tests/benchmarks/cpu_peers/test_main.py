import sys

import pytest

from benchmarks.cpu_peers import __main__ as command
from benchmarks.cpu_peers.contenders import Measured, Round
from benchmarks.cpu_peers.work import Work


def test_transformers_runs_only_the_bundled_model():
    names = ("llama-bench", "engine", "transformers")

    parts = command.parts("qwen3-0.6b", names, ["int8", "int4"], ["Q8_0"])
    bundled = command.parts("bundled", names, ["int8"], ["Q8_0", "Q4_0"])

    assert parts == [("llama-bench", "Q8_0"), ("engine", "int8"), ("engine", "int4")]
    assert bundled[-1] == ("transformers", "float32")


def test_contenders_alternate_and_a_failed_one_does_not_end_the_run(monkeypatch, capsys):
    calls = []

    def good(_round, weights):
        calls.append(weights)
        return Measured({"decode_1": float(len(calls))})

    def bad(_round, weights):
        calls.append(weights)
        if len(calls) > 2:
            raise SystemExit("the service did not start")
        return Measured({"http_1": 5.0}, {"quantization": "int8"})

    monkeypatch.setattr(command, "CONTENDERS", {"engine": good, "service": bad})
    todo = [command.Part("engine", "a"), command.Part("service", "b")]
    results = command.Results()

    command.measure(Round("bundled", Work(), 2, {}), todo, 3, results)

    assert calls == ["a", "b", "a", "b", "a"]
    assert results.samples[("bundled", "engine", "a", "decode_1")] == [1.0, 3.0, 5.0]
    assert results.samples[("bundled", "service", "b", "http_1")] == [5.0]
    (failure,) = results.failures
    assert failure["what"] == "bundled, service, b, round 2"
    assert "did not start" in failure["error"]
    assert "FAILED" in capsys.readouterr().out
    assert results.about == {"bundled, service, b": {"quantization": "int8"}}


def options(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["cpu_peers", *arguments])
    monkeypatch.setattr(command.os, "sched_setaffinity", lambda *_: None)
    return command.read_options()


def test_files_are_read_by_tessera_and_llama_cpp_in_the_same_formats(monkeypatch):
    found = options(monkeypatch, "--files", "gguf", "--formats", "Q8_0", "Q6_K")

    assert found.models == ["smollm2", "qwen3-0.6b"]
    assert command.parts("smollm2", ["engine", "llama-bench"], found.quantization, found.formats) == [
        ("engine", "Q8_0"), ("engine", "Q6_K"), ("llama-bench", "Q8_0"), ("llama-bench", "Q6_K"),
    ]  # fmt: skip
    assert "transformers" not in found.contenders
    assert "smollm2" not in options(monkeypatch).models


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--files gguf --quantization int8", "--quantization has no effect with --files gguf"),
        ("--files gguf --contenders transformers", "transformers reads no GGUF file"),
        ("--models smollm2", "--models smollm2: a GGUF file alone, which needs --files gguf"),
        ("--formats Q8_0 Q4_K_M", "--formats Q4_K_M: only with --files gguf; others: Q8_0, Q4_0, BF16"),
        ("--files gguf --formats Q9_0", "invalid choice: 'Q9_0'"),
        ("--threads 0", "--threads must be between 1 and"),
    ],
)  # fmt: skip
def test_options_without_effect_are_errors(monkeypatch, capsys, arguments, error):
    with pytest.raises(SystemExit):
        options(monkeypatch, *arguments.split())

    assert error in capsys.readouterr().err
