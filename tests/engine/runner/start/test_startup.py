"""Defaults of settings that the operator does not set, and the end of a start that fails."""

import queue
import weakref

import pytest

from kernels import detect
from kernels.arch import CATALOGUE, CPU
from kernels.cpu.library import load
from server.engine.core.messages import EngineConfig, StartupFailed
from server.engine.core.start_checks import StartupError
from server.engine.link.engine_process import process
from server.engine.link.protocol import EngineLaunch
from server.engine.runner.start.quantization import resolved_quantization
from server.engine.runner.start.step_limits import step_limits
from tests.engine.runner.test_engine_model import greedy, make_engine
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.model.configs import changed, model_config

MODEL = model_config(
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


def processor(name):
    return detect("cpu") if name == "cpu" else CATALOGUE[name]


@pytest.mark.parametrize(
    ("arch", "sequences", "budget", "prefill", "expected"),
    [
        ("cpu", None, None, None, (64, 512, 512)),
        ("cpu", 1000, None, None, (1000, 2000, 2000)),
        ("cpu", None, None, 4096, (64, 512, 4096)),
        ("h100", None, None, None, (256, 1024, 8192)),
        ("h100", None, 100, None, (100, 100, 100)),
        ("h100", None, 9000, None, (256, 9000, 9000)),
        ("h100", None, 1024, 2048, (256, 1024, 2048)),
        ("h100", None, None, 700, (256, 700, 700)),
        ("h100", None, None, 100, (100, 100, 100)),
        ("h100", 3, 7, None, (3, 7, 7)),
    ],
)
def test_default_limits_depend_on_the_device(arch, sequences, budget, prefill, expected):
    config = EngineConfig(
        model_path="",
        model_id="",
        max_num_seqs=sequences,
        max_num_batched_tokens=budget,
        max_prefill_tokens=prefill,
    )

    limits = step_limits(config, MODEL, processor(arch), chunk=1)

    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.prefill_budget) == expected


@pytest.mark.parametrize(
    ("arch", "hidden_size", "num_ranks", "expected"),
    [
        ("h100", 2048, 1, 4096),
        ("h100", 2048, 2, 8192),
        ("h100", 4096, 1, 1024),
        ("a100", 2048, 1, 1024),
        ("t4", 512, 1, 4096),
    ],
)
def test_a_small_model_computes_more_tokens_of_prompts_alone(
    arch, hidden_size, num_ranks, expected
):
    model = changed(
        MODEL,
        num_layers=24,
        hidden_size=hidden_size,
        head_dim=64,
        num_heads=hidden_size // 64,
        num_kv_heads=8,
        intermediate_size=4 * hidden_size,
    )
    config = EngineConfig(model_path="", model_id="", tensor_parallel=num_ranks)

    assert step_limits(config, model, processor(arch), chunk=1).prefill_budget == expected


@pytest.mark.parametrize(
    ("sequences", "budget", "expected"),
    [(None, None, (64, 512)), (None, 70, (7, 70)), (7, 70, (7, 70)), (2000, None, (2000, 4000))],
)
def test_a_step_of_a_hybrid_has_room_for_a_chunk(sequences, budget, expected):
    config = EngineConfig(
        model_path="", model_id="", max_num_seqs=sequences, max_num_batched_tokens=budget
    )

    limits = step_limits(config, MODEL, CPU, chunk=64)

    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == expected


@pytest.mark.parametrize(("sequences", "budget", "least"), [(8, 70, 71), (None, 63, 64)])
def test_too_few_tokens_for_a_step_of_a_hybrid_are_refused(sequences, budget, least):
    config = EngineConfig(
        model_path="", model_id="", max_num_seqs=sequences, max_num_batched_tokens=budget
    )

    with pytest.raises(StartupError, match=rf"tokens is {budget}; at least {least} is needed"):
        step_limits(config, MODEL, CPU, chunk=64)


@pytest.mark.skipif(isinstance(load(), str), reason=str(load()))
def test_kernels_that_compute_token_by_token_need_no_room_for_a_chunk(tmp_path):
    CASES["granite4"].save(tmp_path)
    limits = {"max_num_batched_tokens": 64, "quantization": "none"}

    engine = make_engine(tmp_path, max_num_seqs=32, **limits)

    prompts = [[2 + (7 * i + j) % 90 for j in range(50)] for i in range(3)]
    found = engine.generate([greedy(i, prompt, 4) for i, prompt in enumerate(prompts)])
    assert list(map(len, found)) == [4] * 3
    assert make_engine(tmp_path, **limits).engine.info.max_num_seqs == 64
    with pytest.raises(StartupError, match=r"at least 95 is needed .* at multiples of 64 tokens"):
        make_engine(tmp_path, max_num_seqs=32, dtype="bfloat16", **limits)


@pytest.mark.parametrize(
    ("fields", "warnings"),
    [
        ({"quantization": "auto"}, 1),
        ({"quantization": "auto", "dtype": "float32"}, 0),
        ({"quantization": "auto", "kv_cache_dtype": "fp8"}, 1),
        ({"quantization": "auto", "tensor_parallel": 2}, 0),
        ({"quantization": "none"}, 0),
    ],
    ids=str,
)
def test_weights_that_are_not_in_int8_for_want_of_the_library_alone_are_warned_about(
    monkeypatch, caplog, fields, warnings
):
    for module in ("kernels.cpu.decoder", "server.engine.runner.start.quantization"):
        monkeypatch.setattr(f"{module}.load", lambda: "the CPU library cannot be loaded")
    model = changed(MODEL, hidden_size=64, intermediate_size=64, num_heads=2, head_dim=32)
    config = EngineConfig(model_path="", model_id="", **fields)

    assert resolved_quantization(config, model, CPU) == (None, False, False)
    assert [it.levelname for it in caplog.records] == ["WARNING"] * warnings
    assert caplog.text.count("int8, so steps take longer: the CPU library cannot be") == warnings


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
    config = EngineConfig(model_path="", model_id="")
    launches.put((EngineLaunch(link=0, config=config), None))
    monkeypatch.setattr("server.engine.runner.start.startup.start_engine", fail)
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
