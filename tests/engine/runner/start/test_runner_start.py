"""Allocation of the KV cache and warm-up in the order of each device, and the errors of a start."""

import contextlib
import logging

import pytest
import torch

from benchmarks.local_engine import LocalEngine
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from server.engine.core.limits import SchedulerConfig
from server.engine.core.memory.kv_demand import CUDA_BYTES, Allowance, NotEnoughMemoryError
from server.engine.core.messages import EngineConfig
from server.engine.core.start_checks import StartupError
from server.engine.runner.start import kv_memory as memory
from server.engine.runner.start import kv_sizes, runner_start
from server.engine.runner.start.startup_progress import Phases
from tests.tiny_checkpoint import write_tiny_checkpoint

LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256)
# 2 (keys, values) x 2 layers x 2 heads x 16 x 4 bytes a token, 8 tokens a block
BLOCK_BYTES = 8 * 512
KEPT_BYTES = 3 * 2**20 + runner_start.GPU_HEADROOM_BYTES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(checkpoint):
    return load_model(checkpoint, ModelConfig.from_folder(checkpoint), torch.float32, "cpu")


def config_for(checkpoint, **changes):
    return EngineConfig(
        **(
            {"model_path": str(checkpoint), "model_id": "tiny", "block_size": 8, "device": "cpu"}
            | {"cuda_graphs": False, "quantization": "none"}
            | changes
        )
    )


class Log:
    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def receive(self, *, wait):
        return []


class FakeGPU:
    """Replaces the GPU functions of a start, and records the order of their calls."""

    def __init__(self, monkeypatch, free):
        self.free = free
        self.seen = []
        monkeypatch.setattr(runner_start, "peak_memory", self.peak_memory)
        monkeypatch.setattr(memory, "free_bytes", lambda _device: self.free)
        monkeypatch.setattr(memory, "release_cached", lambda _device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
        monkeypatch.setattr(runner_start, "warm_up", lambda *_: self.seen.append("warm up"))
        monkeypatch.setitem(kv_sizes.SHARE, "cpu", kv_sizes.SHARE["cuda"])
        self.failures = 0

        def compute_largest_step(runner, limits):
            self.seen.append(("largest step", runner.num_cache_tokens, limits))
            if self.failures:
                self.failures -= 1
                raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(runner_start, "compute_largest_step", compute_largest_step)

    @contextlib.contextmanager
    def peak_memory(self, _device):
        self.seen.append("measure")
        yield lambda: 3 * 2**20


def test_on_a_gpu_the_largest_step_is_computed_again_after_the_cache_is_allocated(
    monkeypatch, model, checkpoint
):
    gpu = FakeGPU(monkeypatch, free=KEPT_BYTES + 100 * BLOCK_BYTES)
    phases = Phases(Log())

    runner = runner_start._start_on_gpu(model, config_for(checkpoint), LIMITS, phases)

    assert gpu.seen == ["measure", "warm up", ("largest step", 80 * 8, LIMITS)]
    assert runner.num_cache_tokens == 80 * 8
    assert list(phases.seconds) == ["warming up", "allocating the KV cache"]


def test_the_cache_leaves_memory_for_the_inputs_of_recorded_steps(monkeypatch, model, checkpoint):
    config = config_for(checkpoint, cuda_graphs=True)
    recorded = runner_start._recorded_bytes(model, config, LIMITS)
    FakeGPU(monkeypatch, free=KEPT_BYTES + recorded + 100 * BLOCK_BYTES)
    monkeypatch.setattr(runner_start, "_can_record", lambda _runner: False)

    runner = runner_start._start_on_gpu(model, config, LIMITS, Phases(Log()))

    assert recorded > 0
    assert runner.num_cache_tokens == 80 * 8


def test_the_cache_shrinks_if_the_largest_step_does_not_fit_beside_it(
    monkeypatch, model, checkpoint
):
    gpu = FakeGPU(monkeypatch, free=KEPT_BYTES + 100 * BLOCK_BYTES)
    gpu.failures = 2

    runner = runner_start._start_on_gpu(model, config_for(checkpoint), LIMITS, Phases(Log()))

    assert [seen[1] for seen in gpu.seen[2:]] == [80 * 8, 40 * 8, 20 * 8]
    assert runner.num_cache_tokens == 20 * 8


def test_a_cache_for_all_sequences_counts_partly_filled_blocks(model, checkpoint):
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=100)

    runner, _ = runner_start.start_runner(model, config_for(checkpoint), limits, Phases(Log()))

    assert runner.num_cache_tokens == 4 * 13 * 8


def test_the_log_says_how_many_of_the_longest_sequences_fit(model, checkpoint, caplog):
    caplog.set_level(logging.INFO, "tessera.engine")
    config = config_for(checkpoint, kv_cache_tokens=800)

    runner_start.start_runner(model, config, LIMITS, Phases(Log()))

    assert "the KV cache holds 800 tokens, 3 sequences of 256 tokens at once" in caplog.text


def test_a_cache_smaller_than_the_models_context_logs_a_warning_with_both_numbers(
    model, checkpoint, caplog
):
    config = config_for(checkpoint, kv_cache_tokens=40)

    _, most = runner_start.start_runner(model, config, LIMITS, Phases(Log()))

    assert most == 40
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for word in ("40 tokens", "256", "--kv-cache-tokens"):
        assert word in warning


def test_a_kernel_compiler_error_ends_the_start_and_says_what_to_install(
    monkeypatch, checkpoint, caplog
):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(runner_start, "warm_up", fail)

    with pytest.raises(StartupError, match=r"warming up failed.*apt-get install gcc"):
        LocalEngine(config_for(checkpoint, kv_cache_tokens=64))
    assert "Traceback" in caplog.text


def test_a_cache_smaller_than_a_block_is_refused_with_its_size(checkpoint):
    with pytest.raises(StartupError, match="--kv-cache-gib 1e-09 is less than one block"):
        LocalEngine(config_for(checkpoint, kv_cache_gib=1e-9))


def test_a_cache_sized_in_gib_holds_as_many_whole_blocks(checkpoint):
    engine = LocalEngine(config_for(checkpoint, kv_cache_gib=0.001))

    assert engine.engine.info.num_blocks == int(0.001 * 2**30) // BLOCK_BYTES


def test_the_error_for_too_small_a_cache_names_the_minimum(model):
    with pytest.raises(NotEnoughMemoryError, match="at least 2"):
        runner_start._max_total_tokens(type("Runner", (), {"num_cache_tokens": 1})(), LIMITS)


def test_the_share_of_a_rank_is_of_its_own_gpu(monkeypatch, checkpoint):
    uses = {"cuda:0": (80, 30), "cuda:1": (80, 32)}
    monkeypatch.setattr(runner_start, "gpu_use", lambda device: uses[str(device)])
    config = config_for(checkpoint, gpu_memory_utilization=0.5, tensor_parallel=2)

    shares = [runner_start._allowance(config, torch.device("cuda", rank)) for rank in range(2)]

    assert shares == [(0.5, 80, 30), (0.5, 80, 32)]
    assert runner_start._allowance(config_for(checkpoint), torch.device("cuda")) is None


def test_on_a_gpu_the_cache_has_what_weights_and_steps_leave_of_the_share(
    monkeypatch, model, checkpoint
):
    FakeGPU(monkeypatch, free=2**40)
    held = CUDA_BYTES + KEPT_BYTES
    granted = Allowance(0.5, 2 * (held + 50 * BLOCK_BYTES), 0)
    monkeypatch.setattr(runner_start, "_allowance", lambda *_: granted)

    runner = runner_start._start_on_gpu(model, config_for(checkpoint), LIMITS, Phases(Log()))

    assert runner.num_cache_tokens == 50 * 8


def test_the_log_says_that_a_share_of_a_gpus_memory_has_no_effect_on_a_cpu(checkpoint, caplog):
    caplog.set_level(logging.INFO, "tessera.engine")
    usual = LocalEngine(config_for(checkpoint)).engine.info.num_blocks

    engine = LocalEngine(config_for(checkpoint, gpu_memory_utilization=0.9))

    assert engine.engine.info.num_blocks == usual
    assert "--gpu-memory-utilization 0.9 has no effect: the model runs on the CPU" in caplog.text


def test_the_log_says_that_compiled_kernels_have_no_effect_on_a_cpu(checkpoint, tmp_path, caplog):
    caplog.set_level(logging.INFO, "tessera.engine")

    engine = LocalEngine(config_for(checkpoint, kv_cache_tokens=64, compiled_kernels=str(tmp_path)))
    engine.close()

    assert "--compiled-kernels has no effect: the model runs on the CPU" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), 1e38])
def test_a_model_whose_scores_are_no_numbers_does_not_start(model, checkpoint, value):
    with torch.no_grad():
        model.norm.fill_(value)

    with pytest.raises(
        StartupError, match="the model's scores are not finite numbers in float32, so every request"
    ):
        runner_start.start_runner(model, config_for(checkpoint), LIMITS, Phases(Log()))
