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
