"""The runner before the first request and after a failed step; its batches, laid out as for a GPU."""

import random

import pytest
import torch

from model.config import ModelConfig
from model.kv_cache import KVCache
from model.transfer import pack, unpack
from model.weights import load_model
from server.engine import batch, runner_start
from server.engine.local import LocalEngine
from server.engine.memory import NotEnoughMemoryError
from server.engine.model_runner import ModelRunner
from server.engine.phases import Phases
from server.engine.protocol import EngineConfig
from server.engine.scheduler import SchedulerConfig
from server.engine.startup import StartupError
from server.engine.warm_up import crowds, first_steps, largest_step
from tests.engine.test_engine_model import greedy, make_engine, random_prompt, tokens
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

CPU = torch.device("cpu")
LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(checkpoint):
    return load_model(checkpoint, ModelConfig.from_folder(checkpoint), torch.float32, "cpu")


def make_runner(model, num_blocks=1):
    config = model.config
    return ModelRunner(
        model,
        KVCache(
            config.num_layers,
            num_blocks,
            8,
            config.num_kv_heads,
            config.head_dim,
            torch.float32,
            "cpu",
        ),
    )


def config_for(checkpoint, **changes):
    return EngineConfig(
        **(
            {"model_path": str(checkpoint), "model_id": "tiny", "block_size": 8, "device": "cpu"}
            | changes
        )
    )


class Log:
    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def receive(self, *, block):
        return []


# --- before the first request -----------------------------------------------------------------------------------


def test_every_invented_step_can_be_computed_with_a_cache_of_one_block(model):
    model.reserve_positions(LIMITS.max_model_len)
    runner = make_runner(model)
    outputs = [
        *first_steps(256, LIMITS, 8),
        *crowds(200, LIMITS, 8),
        largest_step(256, LIMITS, VOCAB_SIZE, 8),
    ]

    for output in outputs:
        result = runner.execute(output)
        runner.forget(-1)
        assert all(token.error is None for token in result.sampled)
        assert len(result.sampled) == len(output.decode) + len(output.prefill)


def test_the_largest_step_leaves_nothing_behind_in_the_runner(model):
    model.reserve_positions(LIMITS.max_model_len)
    runner = make_runner(model)

    runner.compute_largest_step(LIMITS)

    assert runner._rows == {}


def test_on_a_gpu_the_cache_is_allocated_after_the_steps_memory_was_measured(
    monkeypatch, model, checkpoint
):
    """The GPU's order of starting, with a device that only pretends."""
    seen = []

    class Peak:
        def __enter__(self):
            seen.append("measure")
            return lambda: 3 * 2**20

        def __exit__(self, *_):
            pass

    def allocate(demand, device, make):
        seen.append("allocate")
        assert demand.kept_bytes == 3 * 2**20 + runner_start._GPU_HEADROOM_BYTES
        assert demand.requested_gib == 0.5
        return make(32)

    monkeypatch.setattr(runner_start, "peak_memory", lambda _device: Peak())
    monkeypatch.setattr(runner_start, "allocate_kv_cache", allocate)
    monkeypatch.setattr(ModelRunner, "warm_up", lambda *_: seen.append("warm up"))
    phases = Phases(Log())

    runner, most = runner_start._start_on_gpu(
        model, config_for(checkpoint, kv_cache_gib=0.5), LIMITS, phases
    )

    assert seen == ["measure", "warm up", "allocate"]
    assert (runner.num_cache_tokens, most) == (256, 256)
    assert list(phases.seconds) == ["warming up", "allocating the KV cache"]


def test_positions_reserved_beforehand_are_not_allocated_again_by_a_larger_cache(model):
    model.reserve_positions(64)
    table = model.rope._cos
    runner = make_runner(model, num_blocks=64)

    for output in first_steps(60, LIMITS, 8):
        runner.execute(output)

    assert model.rope._cos is table


# --- a start that fails -----------------------------------------------------------------------------------------


def test_an_error_of_the_kernels_compiler_ends_the_start_with_what_to_install(
    monkeypatch, checkpoint, caplog
):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(ModelRunner, "warm_up", fail)

    with pytest.raises(StartupError, match=r"warming up failed.*apt-get install gcc"):
        LocalEngine(config_for(checkpoint, kv_cache_tokens=64))
    assert "Traceback" in caplog.text


def test_a_cache_smaller_than_a_block_is_refused_with_its_size(checkpoint):
    with pytest.raises(StartupError, match="--kv-cache-gib 1e-09 is less than one block"):
        LocalEngine(config_for(checkpoint, kv_cache_gib=1e-9))


def test_a_cache_sized_in_gib_holds_as_many_whole_blocks(checkpoint):
    engine = LocalEngine(config_for(checkpoint, kv_cache_gib=0.001))

    # 2 (keys, values) x 2 layers x 2 heads x 16 x 4 bytes a token, 8 tokens a block
    assert engine.engine.info.num_blocks == int(0.001 * 2**30) // (8 * 512)


def test_too_small_a_cache_names_the_least(model):
    with pytest.raises(NotEnoughMemoryError, match="at least 2"):
        runner_start._max_total_tokens(type("Runner", (), {"num_cache_tokens": 1})(), LIMITS)


# --- after a failed step ----------------------------------------------------------------------------------------


def test_a_failed_step_on_a_cpu_ends_no_engine(model):
    assert make_runner(model).recover(RuntimeError("a shape is wrong")) is True


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        torch.OutOfMemoryError("CUDA out of memory."),
    ],
    ids=["triton", "pytorch", "memory"],
)
def test_a_gpu_is_asked_whether_its_context_still_works(monkeypatch, model, error):
    runner = make_runner(model)
    runner._device = torch.device("cuda")
    monkeypatch.setattr("server.engine.model_runner.release_cached", lambda _device: None)

    def broken(_device):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    assert runner.recover(error) is True
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert runner.recover(error) is False
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr("server.engine.model_runner.release_cached", broken)
    assert runner.recover(error) is not isinstance(error, torch.OutOfMemoryError)


def test_what_a_step_held_when_memory_ran_out_is_let_go(monkeypatch, model):
    released, held = [], []

    class Large:
        def __del__(self):
            released.append("freed")

    def step():
        large = Large()
        held.append(id(large))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(
        "server.engine.model_runner.release_cached", lambda _device: released.append("released")
    )
    try:
        step()
    except torch.OutOfMemoryError as error:
        make_runner(model).recover(error)

    assert released == ["freed", "released"]


# --- the batch --------------------------------------------------------------------------------------------------


def test_a_batch_in_one_buffer_gives_the_tokens_of_separate_tensors(monkeypatch, checkpoint):
    rng = random.Random(1)
    requests = [greedy(i, random_prompt(rng, 1, 60), 20) for i in range(8)]
    expected = [tokens(events) for events in make_engine(checkpoint).generate(requests)]

    def through_one_buffer(arrays, _device):
        buffer = torch.full((1 << 20,), 255, dtype=torch.uint8)
        pack(arrays, buffer)
        return unpack(arrays, buffer)

    monkeypatch.setattr(batch, "upload", through_one_buffer)

    assert [tokens(e) for e in make_engine(checkpoint).generate(requests)] == expected
