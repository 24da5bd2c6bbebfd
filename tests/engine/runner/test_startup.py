"""Defaults of settings that the operator does not set, and the end of a start that fails."""

import queue
import weakref

import pytest

from model.checkpoint.config import ModelConfig
from server.engine.core.messages import EngineConfig, StartupFailed
from server.engine.core.start_checks import StartupError
from server.engine.link import process
from server.engine.link.protocol import EngineLaunch
from server.engine.runner.startup import step_limits

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)


@pytest.mark.parametrize(
    ("device", "sequences", "budget", "expected"),
    [
        ("cpu", None, None, (64, 512)),
        ("cuda", None, None, (256, 1024)),
        ("cpu", 1000, None, (1000, 2000)),
        ("cuda", None, 100, (100, 100)),
        ("cuda", None, 9000, (256, 9000)),
        ("cuda", 3, 7, (3, 7)),
    ],
)
def test_default_limits_depend_on_the_device(device, sequences, budget, expected):
    config = EngineConfig(
        model_path="", model_id="", max_num_seqs=sequences, max_num_batched_tokens=budget
    )

    limits = step_limits(config, MODEL, device)

    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == expected


def test_the_memory_of_a_failed_start_is_free_before_the_failure_is_reported(monkeypatch):
    alive, reports = [], []

    class Model:
        pass

    def fail(config, channel, ranks):
        model = Model()  # held by this frame, and so by the exception
        alive.append(weakref.ref(model))
        raise StartupError("warming up failed: out of memory")

    class RecordingChannel:
        def __init__(self, *_):
            pass

        def send(self, message):
            reports.append((message, alive[0]()))

        def close(self):
            pass

    launches = queue.SimpleQueue()
    launches.put(EngineLaunch(address="", config=EngineConfig(model_path="", model_id="")))
    monkeypatch.setattr("server.engine.runner.startup.start_engine", fail)
    monkeypatch.setattr(process, "Channel", RecordingChannel)
    monkeypatch.setattr(process, "_listen", lambda *_: None)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    for name in ("dump_stacks_on_signal", "set_passive_openmp_wait"):
        monkeypatch.setattr(process, name, lambda: None)
    monkeypatch.setattr(process.queue, "SimpleQueue", lambda: launches)
    with pytest.raises(SystemExit) as exit_status:
        process.main()

    assert exit_status.value.code == 1
    assert reports == [(StartupFailed("warming up failed: out of memory"), None)]
